"""The passes of a step: each a forward and its backward, as ranges of operators and events."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memplan.phases.steps import StepTable, find_steps
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.step_graph import Bools
from memplan.types.trace import I32, I64, EventKind, Phase, Role, Trace

AGAIN = -2
"""`Ops.call` of what backward runs with gradients."""


def call_numbers(call: I32) -> tuple[I64, Bools]:
    """From `Ops.call`: the number of each operator's call, or a negative number; and which
    operators are inside the forward of an `autograd.Function`."""
    in_function = call < AGAIN
    return np.where(in_function, AGAIN - 1 - call.astype(np.int64), call), in_function


@dataclass(frozen=True)
class Pass:
    """Operators `[start, stop)` of a trace, the forward's before row `backward`; events
    `[first_event, last_event)` are theirs."""

    start: int
    backward: int
    stop: int
    first_event: int
    last_event: int


@dataclass(frozen=True)
class StepPasses:
    """One step's events `[start, stop)`, and its passes in order."""

    start: int
    stop: int
    passes: list[Pass]


def step_passes(trace: Trace, step: int | None = None) -> StepPasses:
    """The passes of a step: by default the steady one, else the last complete one, else, in a
    trace that completes none, all that follows the building of the model.

    Raises NoAnswerError where the trace does not say what operators did, or nothing is
    differentiated; UsageError for a step that the trace does not have.
    """
    if not (trace.ops.moved_bytes >= 0).any():
        raise _no_operators(trace)
    found = _passes(trace, *step_range(trace, find_steps(trace), step))
    if not found.passes:
        raise NoAnswerError(
            "the trace has no step with a forward and a backward pass",
            "capture a training job: one that calls loss.backward()",
        )
    return found


def passes_of_steps(trace: Trace) -> list[StepPasses]:
    """Of each complete step, but for those whose passes run the operators of a later one's."""
    table, ops = find_steps(trace), trace.ops
    found: dict[bytes, tuple[int, int, int, int]] = {}
    for step in range(len(table)):
        of_step = step_range(trace, table, step)
        rows = slice(*of_step[2:])
        inside = np.isin(ops.phase[rows], (Phase.FORWARD, Phase.BACKWARD))
        found[ops.name[rows][inside].tobytes()] = of_step
    return [_passes(trace, *of_step) for of_step in found.values()]


def _passes(trace: Trace, start: int, stop: int, first: int, last: int) -> StepPasses:
    ops = trace.ops
    phase = ops.phase[first:last]
    of_interest = np.flatnonzero((phase == Phase.FORWARD) | (phase == Phase.BACKWARD)) + first
    forward = ops.phase[of_interest] == Phase.FORWARD
    if not forward.any():
        return StepPasses(start, stop, [])
    forward = _with_differentiated(forward, ops.call[of_interest])
    begins = np.flatnonzero(forward & np.concatenate(([True], ~forward[:-1])))
    passes = []
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(forward)], strict=True):
        backward = np.flatnonzero(~forward[begin:end])
        if len(backward):
            rows = of_interest[begin:end]
            passes.append(
                _pass(trace, int(rows[0]), int(rows[backward[0]]), int(rows[-1]) + 1, first, stop)
            )
    return StepPasses(start, stop, passes)


def _with_differentiated(forward: Bools, call: I32) -> Bools:
    """The rows of forwards, and of backwards between calls that run with gradients throughout
    (`create_graph=True`): a later backward goes through these as well."""
    turns = np.flatnonzero(np.diff(forward)) + 1
    found = forward.copy()
    for begin, end in pairwise(turns.tolist()):  # the last backward is none of them
        before, after = call[begin - 1], call[end]
        if not forward[begin] and (call[begin:end] == AGAIN).all():
            found[begin:end] = before < 0 or before != after
    return found


def _no_operators(trace: Trace) -> NoAnswerError:
    if trace.meta.origin == "capture":
        if len(trace.ops):
            what = "the trace was captured by an older memplan, which did not note all it takes"
        else:
            what = "the trace has no operators: nothing ran on the device"
        return NoAnswerError(f"{what} to recompute", "capture the job again: memplan estimate -o")
    return NoAnswerError(
        f"the trace ({trace.meta.origin}) tells requests of memory only, not the operators that "
        "recomputation would run again",
        "capture the job itself: memplan estimate -o job.trace SCRIPT",
    )


def step_range(trace: Trace, table: StepTable, step: int | None) -> tuple[int, int, int, int]:
    """Events `[start, stop)` and operators `[first, last)` of a step, as by `step_passes`. Raises
    UsageError for a step that the trace does not have."""
    count = len(table)
    if step is not None and not 0 <= step < count:
        has = f"steps 0 to {count - 1}" if count else "no complete step"
        raise UsageError(f"there is no step {step}", f"the trace has {has}")
    ops = trace.ops
    if not count:
        working = trace.events.phase != Phase.SETUP
        start = int(working.argmax()) if working.any() else 0
        return start, len(trace), 0, len(ops)
    if step is None:
        step = table.steady if table.steady is not None else count - 1
    numbers = np.maximum.accumulate(ops.step)
    first, last = np.searchsorted(numbers, [step, step + 1]).tolist()
    return int(table.start[step]), int(table.stop[step]), first, last


def _pass(trace: Trace, start: int, backward: int, stop: int, first: int, end: int) -> Pass:
    ops = trace.ops
    # What a call of a module does without gradients before anything else belongs to it as well.
    call, _ = call_numbers(ops.call[first : start + 1])
    while start > first and call[start - first] >= 0 and call[start - 1 - first] == call[-1]:
        start -= 1
    last_event = int(ops.event[stop]) if stop < len(ops) else end
    return Pass(start, backward, stop, int(ops.event[start]), min(last_event, end))


def passes_overlap(trace: Trace) -> bool:
    """Whether backward passes come after other forwards, as in a pipeline's schedule: most bytes
    that a step's forwards make and that are gone in a pass are gone in a later one.

    Raises as `step_passes`.
    """
    storage, size = trace.events.storage, trace.events.bytes
    found = step_passes(trace)
    own = later = 0
    for one in found.passes:
        backward = int(trace.ops.event[one.backward])
        made = storage[_of_kind(trace, EventKind.ALLOC, one.first_event, backward)]
        gone = _of_kind(trace, EventKind.FREE, backward, found.stop)
        gone = gone[np.isin(storage[gone], made)]
        own += int(size[gone[gone < one.last_event]].sum())
        later += int(size[gone[gone >= one.last_event]].sum())
    return later > own


def reads_twice(trace: Trace) -> bool:
    """Whether a step's later backward passes mostly read what the backward of its own pass has read
    before, as where two losses go back through one graph (`retain_graph=True`).

    Raises as `step_passes`.
    """
    ops, events = trace.ops, trace.events
    found = step_passes(trace).passes
    size = np.zeros(len(trace.storages), np.int64)
    twice = once = 0
    for one, later in pairwise(found):
        backward = int(ops.event[one.backward])
        made = _of_kind(trace, EventKind.ALLOC, one.first_event, backward)
        size[:] = 0
        size[events.storage[made]] = events.bytes[made]
        own, after = (
            np.unique(ops.reads[ops.reads_start[p.backward] : ops.reads_start[stop]])
            for p, stop in ((one, one.stop), (later, found[-1].stop))
        )
        both = np.isin(after, own)
        twice += int(size[after[both]].sum())
        once += int(size[after[~both]].sum())
    return twice > once


def differentiated_bytes(trace: Trace) -> int:
    """Bytes that a step's passes make and a later backward lets go of, most at once, where a
    backward that runs with gradients, as with `create_graph=True`, has read or made them. 0 where
    no gradient is differentiated.

    Raises as `step_passes`.
    """
    events, ops, found, most = trace.events, trace.ops, step_passes(trace).passes, 0
    reader = np.repeat(np.arange(len(ops)), np.diff(ops.reads_start))
    for one in found:
        backward = int(ops.event[one.backward])
        gone = events.storage[_of_kind(trace, EventKind.FREE, backward, one.last_event)]
        made = _of_kind(trace, EventKind.ALLOC, found[0].first_event, backward)
        storage, rows = events.storage[made], np.searchsorted(ops.event, made, side="right") - 1
        kept = np.isin(storage, gone) & (trace.storages.role[storage] != Role.GRADIENT)
        again = ops.call == AGAIN
        again[one.backward :] = False
        if again[rows[kept]].any():
            kept &= again[rows] | np.isin(storage, ops.reads[again[reader]])
            most = max(most, int(events.bytes[made[kept]].sum()))
    return most


def _of_kind(trace: Trace, kind: EventKind, start: int, stop: int) -> I64:
    """Events of storages, from `start` to `stop`."""
    events = trace.events
    rows = (events.kind[start:stop] == kind) & (events.storage[start:stop] >= 0)
    return np.flatnonzero(rows) + start


def alive_after(trace: Trace) -> I64:
    """Requested bytes alive after each event, behind a 0 for the beginning of the trace: so element
    i is the number of bytes alive before event i."""
    events = trace.events
    change = np.where(events.kind == EventKind.ALLOC, events.bytes, 0) - np.where(
        events.kind == EventKind.FREE, events.bytes, 0
    )
    return np.concatenate(([0], np.cumsum(change)))
