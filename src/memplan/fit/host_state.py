"""The lever of the host's memory: optimizers' state there, streamed through the card."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec

from memplan.fit.answer import Lever
from memplan.fit.optimizer_in_backward import possible_part, with_its_lever
from memplan.fit.plans import Planner
from memplan.fit.state import CAUTION, State
from memplan.report.text import format_bytes
from memplan.timing.seconds import op_seconds
from memplan.timing.step import state_wait, steady_ops
from memplan.types.errors import NoAnswerError
from memplan.types.plan import StatePart
from memplan.types.trace import EventKind, Phase, Role, Trace
from memplan.worker.failure import CaptureFailedError

_STEP = 0.125
"""Shares of state are compared in steps of this."""
_QUICK = 0.02
"""This lever is tried early if it adds at most this share of the step's time."""


def with_state_on_host(state: State, share: float | None = None) -> State:
    """The job with this share of the optimizers' state on the host, or as much as it takes to fit,
    all of it where it fits without; as it is, with a sentence, where there is none or the script
    fails with it.

    The time added is that by which the card waits for it, as the capture shows which operators run
    beside which copies; all of the copies' where others are on the link meanwhile.
    """
    total, first, largest = _shares(state)
    if not first or state.plan.low_bit is not None:
        return state
    if share is not None:
        return _tried(state, total, share)
    share = first
    found = _tried(state, total, share)
    if not found.fits and found.plan.state is not None and found.plan.state.share < largest:
        found = _tried(state, total, largest)
    return found


def cheaper_share(
    plain: State, base: State, planner: Planner, seconds: float, worth: float
) -> float | None:
    """The share of state on the host with which it and recomputation should add least: less than
    these seconds, by as many as are `worth` it. None where there is none.

    `plain`: without state on the host; `base`: with some or none, and what `planner` plans on.
    """
    total, some, share = _shares(plain)
    if not some or base.plan.low_bit is not None:
        return None
    link = base.job.profile.host_link_bytes_per_second
    part = base.plan.state
    now, waits = (part.share, part.added_seconds) if part is not None else (0.0, 0.0)
    beside = now * total / link - waits if part is not None else _beside(base)
    best, least, before = None, seconds - worth, math.inf
    while share > 0:
        added = planner.added_with(int((share - now) * total))
        added = math.inf if added is None else added + base.added_seconds
        added += max(share * total / link - beside, 0.0) - waits
        if not added < before:  # it falls, then rises
            break
        if added < least and share != now:
            best, least = share, added
        share, before = share - _STEP, added
    return best


def with_less_state(state: State) -> State:
    """A job that fits with state on the host, with as much less of that as the card has room for;
    as it is where that is little, or where the script fails with it."""
    before = state.plan.state
    assert before is not None
    total = int(before.host_bytes / before.share)
    room = state.job.profile.total_memory_bytes - state.needed
    share = before.share - room / (CAUTION * total)
    if before.share - share < _STEP or share <= 0:
        return state
    try:
        after = state.trying(state=StatePart(share=share), allocation=None)
    except CaptureFailedError:
        return state
    more = after.verdict.estimate.high_bytes - state.verdict.estimate.high_bytes
    part = _part(after, total, share)
    levers = [one for one in state.levers if one.kind != "addresses"]
    for place, one in enumerate(levers):
        if one.kind == "state":
            levers[place] = _lever(part, max(one.saved_bytes - more, 0))
    return after.with_parts(state=part).with_levers(*levers)


def least_seconds(state: State) -> float:
    """What it adds to a step at the least, known before a capture."""
    total, share, _ = _shares(state)
    seconds = share * total / state.job.profile.host_link_bytes_per_second
    return max(seconds - _beside(state), 0.0)


def is_quick(state: State) -> bool:
    """Whether it adds so little to a step that it is tried before recomputation."""
    with suppress(NoAnswerError):
        return _shares(state)[1] > 0 and least_seconds(state) < _QUICK * state.step_seconds()
    return False


def _beside(state: State) -> float:
    """Seconds of the step's operators that may run while state passes the link."""
    trace, profile = state.captured.trace, state.job.profile
    start, stop = steady_ops(trace)
    phase, first = trace.ops.phase[start:stop], trace.meta.steady_steps
    beside = phase == Phase.OPTIMIZER
    if state.plan.order is not None or possible_part(state) is not None:
        beside |= phase == Phase.BACKWARD
    seconds = op_seconds(trace, profile, start, stop)[beside].sum()
    return float(seconds) / (max(first[1] - first[0], 1) if first else 1)


def among_other_copies(state: State) -> State:
    """The same where other copies pass the link in the backward pass, too: state that moves there
    may then add all the time that its own copies take."""
    part = state.plan.state
    if part is None or state.plan.order is None:
        return state
    seconds = part.host_bytes / state.job.profile.host_link_bytes_per_second
    levers = (
        msgspec.structs.replace(one, added_seconds=seconds) if one.kind == "state" else one
        for one in state.levers
    )
    part = msgspec.structs.replace(part, added_seconds=seconds)
    return state.with_parts(state=part).with_levers(*levers)


def _shares(state: State) -> tuple[int, float, float]:
    """Bytes of state; the share of it to begin with, 0 for none, and the largest."""
    total = state_bytes(state.captured.trace)
    missing = state.needed - state.job.profile.total_memory_bytes
    return total, *state.shares_for_host(total, missing)


def _tried(state: State, total: int, share: float) -> State:
    part = StatePart(share=share)
    tries: list[dict[str, Any]] = [{"state": part}]
    if order := possible_part(state):  # then copies run beside the backward pass
        tries.insert(0, {"order": order, "step": None, "state": part})
    after = state.with_tried(
        lambda after: _lever(_part(after, total, share)),
        *tries,
        fails="Optimizer state stays on the card",
    )
    if after.plan.state is None:
        return after
    after = with_its_lever(after) if order else after
    return after.with_parts(state=_part(after, total, share))


def _part(after: State, total: int, share: float) -> StatePart:
    """What a capture says of a share of all state on the host."""
    moved = total - state_bytes(after.captured.trace)
    waits = state_wait(after.captured.trace, after.job.profile)
    if waits is None or after.plan.frozen is not None:
        waits = moved / after.job.profile.host_link_bytes_per_second
    return StatePart(share=share, host_bytes=moved, added_seconds=waits)


def _lever(part: StatePart, saved_bytes: int = 0) -> Lever:
    name = f"{format_bytes(part.host_bytes)} on the host"
    seconds = part.added_seconds
    return Lever(
        kind="state", name=name, saved_bytes=saved_bytes, added_seconds=seconds, bound="link"
    )


def state_bytes(trace: Trace) -> int:
    """Bytes of all optimizer state that is ever allocated on the card."""
    events = trace.events
    made = (events.kind == EventKind.ALLOC) & (events.storage >= 0)
    role = trace.storages.role[events.storage[made]]
    return int(events.bytes[made][role == Role.OPTIMIZER_STATE].sum())
