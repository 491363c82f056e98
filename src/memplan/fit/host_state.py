"""The lever of the host's memory: optimizers' state there, streamed through the card."""

from __future__ import annotations

import math
from contextlib import suppress

from memplan.fit.answer import Lever
from memplan.fit.plans import Planner
from memplan.fit.state import State
from memplan.report.text import format_bytes
from memplan.types.errors import NoAnswerError
from memplan.types.plan import StatePart
from memplan.types.trace import EventKind, Role, Trace

_STEP = 0.125
"""Shares of state are compared in steps of this."""
_QUICK = 0.02
"""This lever is tried early if it adds at most this share of the step's time."""


def with_state_on_host(state: State, share: float | None = None) -> State:
    """The job with this share of the optimizers' state on the host, or as much as it takes to fit,
    all of it where it fits without; as it is, with a sentence, where there is none or the script
    fails with it.

    The time added is that of moving it: both directions go at once, and nothing else is counted as
    done meanwhile.
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
    now = base.plan.state.share if base.plan.state is not None else 0.0
    best, least, before = None, seconds - worth, math.inf
    while share > 0:
        freed = int((share - now) * total)
        added = planner.added_with(freed)
        added = math.inf if added is None else added + base.added_seconds
        added += freed / base.job.profile.host_link_bytes_per_second
        if not added < before:  # it falls, then rises
            break
        if added < least and share != now:
            best, least = share, added
        share, before = share - _STEP, added
    return best


def least_seconds(state: State) -> float:
    """What it adds to a step at the least, known before a capture."""
    total, share, _ = _shares(state)
    return share * total / state.job.profile.host_link_bytes_per_second


def is_quick(state: State) -> bool:
    """Whether it adds so little to a step that it is tried before recomputation."""
    with suppress(NoAnswerError):
        return 0 < least_seconds(state) < _QUICK * state.step_seconds()
    return False


def _shares(state: State) -> tuple[int, float, float]:
    """Bytes of state; the share of it to begin with, 0 for none, and the largest."""
    total = state_bytes(state.captured.trace)
    missing = state.needed - state.job.profile.total_memory_bytes
    return total, *state.shares_for_host(total, missing)


def _tried(state: State, total: int, share: float) -> State:
    def part(after: State) -> StatePart:
        moved = total - state_bytes(after.captured.trace)
        seconds = moved / state.job.profile.host_link_bytes_per_second
        return StatePart(share=share, host_bytes=moved, added_seconds=seconds)

    def lever(after: State) -> Lever:
        name = f"{format_bytes(part(after).host_bytes)} on the host"
        return Lever(kind="state", name=name, added_seconds=part(after).added_seconds, bound="link")

    after = state.with_tried(
        lever,
        {"state": StatePart(share=share)},
        fails="Optimizer state stays on the card",
    )
    return after if after.plan.state is None else after.with_parts(state=part(after))


def state_bytes(trace: Trace) -> int:
    """Bytes of all optimizer state that is ever allocated on the card."""
    events = trace.events
    made = (events.kind == EventKind.ALLOC) & (events.storage >= 0)
    role = trace.storages.role[events.storage[made]]
    return int(events.bytes[made][role == Role.OPTIMIZER_STATE].sum())
