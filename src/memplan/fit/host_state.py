"""The lever of the host's memory: optimizers' state there, streamed through the card."""

from __future__ import annotations

from memplan.fit.answer import Lever
from memplan.fit.judge import least_card
from memplan.fit.state import State
from memplan.report.text import format_bytes
from memplan.types.plan import StatePart
from memplan.types.trace import EventKind, Role, Trace
from memplan.worker.failure import CaptureFailedError

_CAUTION = 1.1
"""More state than is missing goes to the host: gaps between blocks do not go with it."""
_MOSTLY = 0.8
"""A share from which on all of it goes."""
_WORTH = 0.01
"""Part of the peak below which it is not worth a part of the plan."""


def with_state_on_host(state: State, *, whole: bool = False) -> State:
    """The job with as much of the optimizers' state on the host as it takes to fit, or all of it;
    as it is, with a sentence, where there is none or the script fails with it.

    The time added is that of moving it: both directions go at once, and nothing else is counted as
    done meanwhile.
    """
    trace, profile = state.captured.trace, state.job.profile
    total = _state_bytes(trace)
    if not total:
        return state
    missing = least_card(trace, profile, state.verdict) - profile.total_memory_bytes
    share = _CAUTION * missing / total
    found = _tried(state, total, 1.0 if whole or share > _MOSTLY else share)
    if not found.fits and found.plan.state is not None and found.plan.state.share < 1:
        found = _tried(state, total, 1.0)
    return found


def _tried(state: State, total: int, share: float) -> State:
    try:
        after = state.trying(state=StatePart(share=share))
    except CaptureFailedError:
        return state.with_note("Optimizer state stays on the card: the script fails with it.")
    moved = total - _state_bytes(after.captured.trace)
    if moved <= 0:
        notes = after.captured.estimate.notes
        return state.with_note(next((n for n in notes if n.startswith("an optimizer's")), ""))
    saved = state.verdict.estimate.high_bytes - after.verdict.estimate.high_bytes
    if saved < _WORTH * state.verdict.estimate.high_bytes:
        return state
    added = moved / state.job.profile.host_link_bytes_per_second
    part = StatePart(share=share, host_bytes=moved, added_seconds=added)
    lever = Lever(
        kind="state",
        name=f"{format_bytes(moved)} on the host",
        saved_bytes=saved,
        added_seconds=added,
    )
    return after.with_parts(state=part).with_lever(lever)


def _state_bytes(trace: Trace) -> int:
    """Of optimizers' state on the card, all that is ever made."""
    events = trace.events
    made = (events.kind == EventKind.ALLOC) & (events.storage >= 0)
    role = trace.storages.role[events.storage[made]]
    return int(events.bytes[made][role == Role.OPTIMIZER_STATE].sum())
