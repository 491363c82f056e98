"""The lever of smaller batches: as many samples for an update, in more passes."""

from __future__ import annotations

import numpy as np

from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Lever
from memplan.fit.judge import moving_share
from memplan.fit.knobs import Knob, find_accumulation, find_knobs
from memplan.fit.options import NumericOption
from memplan.fit.state import State, step_range
from memplan.fit.updates import with_smaller_updates
from memplan.types.plan import Argument, ArgumentsPart
from memplan.types.trace import EventKind, Role, Trace
from memplan.worker.failure import CaptureFailedError

_SAME_SAMPLES = 0.01
"""The bytes of an update's batches may differ by this fraction: a last batch may be smaller."""


def with_micro_batches(state: State) -> State:
    """The job with the largest batch that fits and as many more batches accumulated for an update;
    where none fits, with the smallest. As it is, with a sentence, where the script has no pair of
    options for it, or does not give an update the same samples with them.

    Each is captured, and its batches' bytes for an update are compared with the plain job's.
    """
    pair = _pair(state.job.program)
    if pair is None:
        return state.with_note(
            "Smaller batches with more accumulation were not tried: no options for both were found "
            f"in {state.job.program.name} or after it."
        )
    batch, accumulation = pair
    if _normalises_over_batch(state.captured.trace):
        return state.with_note(
            "Smaller batches were not tried: batch norm takes its statistics over a batch."
        )
    parts = _numbers_of_parts(batch)
    share = moving_share(state.verdict.estimate, state.job.profile)
    probe = next((i for i, one in enumerate(parts) if one * share >= 1), len(parts) - 1)
    low, high = 0, len(parts)
    best = state
    while low < high:
        found = _tried(state, batch, accumulation, parts[probe])
        if isinstance(found, str):
            return state.with_note(f"Smaller batches were not taken: {found}.")
        if found.fits:
            high = probe
        else:
            low = probe + 1
        if found.fits or not best.fits:
            best = found
        probe = (low + high) // 2
    if "micro" not in accumulation.option:
        return best
    return best.with_note(
        "The other stages of the pipeline were not looked at: with batch norm in one of them, "
        "smaller micro-batches would be another method."
    )


def with_larger_batches(state: State, smaller: State, _fits: bool) -> State | None:
    """The job with the next larger batches than `smaller` has, whose are the largest that fit: with
    recomputation they may add less. None where `smaller` does not fit as it is, or there are none.
    """
    pair, part = _pair(state.job.program), smaller.plan.arguments
    if pair is None or part is None or not smaller.fits:
        return None
    batch, accumulation = pair
    larger = [n for n in _numbers_of_parts(batch) if batch.value // n > part.changes[0].value]
    found = _tried(state, batch, accumulation, larger[-1]) if larger else None
    return found if isinstance(found, State) else None


def _numbers_of_parts(batch: Knob) -> list[int]:
    return [parts for parts in range(2, batch.value + 1) if batch.value % parts == 0]


def _tried(state: State, batch: Knob, accumulation: NumericOption, parts: int) -> State | str:
    """The job in so many parts, or why that is not the same job."""
    changes = [
        Argument(batch.option, batch.value // parts),
        Argument(accumulation.option, accumulation.value * parts),
    ]
    words = " ".join(f"{change.option} {change.value}" for change in changes)
    state.job.search.say(f"trying {words}", 4)
    try:
        after = state.trying(arguments=ArgumentsPart(changes=changes), order=None)
    except CaptureFailedError:
        return f"the script fails with {words}"
    before, now = input_bytes(state.captured.trace), input_bytes(after.captured.trace)
    if not before or abs(now - before) > _SAME_SAMPLES * before:
        return f"with {words} an update has {now / max(before, 1):.2f} times the samples"
    kept = tuple(lever for lever in state.levers if lever.kind != "order")
    saved = state.verdict.estimate.high_bytes - after.verdict.estimate.high_bytes
    lever = Lever(
        kind="batches",
        name=words,
        numbers="rounding",
        saved_bytes=max(saved, 0),
        added_seconds=max(_seconds(after) - _seconds(state), 0.0),
    )
    after = after.with_levers(*kept, lever)
    return after if state.plan.order is None else with_smaller_updates(after)


def _seconds(state: State) -> float:
    """Seconds of the whole step: a pipeline's schedule has different passes."""
    return state.captured.estimate.step_seconds or state.step_seconds()


def _pair(program: ScriptTarget) -> tuple[Knob, NumericOption] | None:
    batch = next((knob for knob in find_knobs(program) if knob.kind == "batch_size"), None)
    accumulation = find_accumulation(program)
    if batch is None or accumulation is None or batch.value < 2:
        return None
    return batch, accumulation


def _normalises_over_batch(trace: Trace) -> bool:
    names = np.array(["batch_norm" in text for text in trace.strings])
    backward = np.array(["backward" in text for text in trace.strings])
    return bool((names & backward)[trace.ops.name].any())


def input_bytes(trace: Trace) -> int:
    """Bytes of the batches of an update, in the steady step or else in the last one."""
    found = step_range(trace)
    if found is None:
        return 0
    events, rows = trace.events, slice(*found)
    made = (events.kind[rows] == EventKind.ALLOC) & (events.storage[rows] >= 0)
    inputs = trace.storages.role[events.storage[rows][made]] == Role.INPUT
    return int(events.bytes[rows][made][inputs].sum())
