"""The lever of the host's memory: optimizers' state there, streamed through the card."""

from __future__ import annotations

from memplan.fit.answer import Lever
from memplan.fit.state import State
from memplan.report.text import format_bytes
from memplan.types.plan import StatePart
from memplan.types.trace import EventKind, Role, Trace

_CAUTION = 1.1
"""More state than is missing goes to the host: gaps between blocks do not go with it."""
_MOSTLY = 0.8
"""A share from which on all of it goes."""


def with_state_on_host(state: State) -> State:
    """The job with as much of the optimizers' state on the host as it takes to fit, all of it where
    it fits without; as it is, with a sentence, where there is none or the script fails with it.

    The time added is that of moving it: both directions go at once, and nothing else is counted as
    done meanwhile.
    """
    total = _state_bytes(state.captured.trace)
    most = state.job.host_bytes
    largest = 1.0 if most is None or not total else min(1.0, most / total)
    if not total or not largest:
        return state
    share = _CAUTION * (state.needed - state.job.profile.total_memory_bytes) / total
    found = _tried(state, total, min(largest, share if 0 < share <= _MOSTLY else 1.0))
    if not found.fits and found.plan.state is not None and found.plan.state.share < largest:
        found = _tried(state, total, largest)
    return found


def _tried(state: State, total: int, share: float) -> State:
    def part(after: State) -> StatePart:
        moved = total - _state_bytes(after.captured.trace)
        seconds = moved / state.job.profile.host_link_bytes_per_second
        return StatePart(share=share, host_bytes=moved, added_seconds=seconds)

    def lever(after: State) -> Lever:
        name = f"{format_bytes(part(after).host_bytes)} on the host"
        return Lever(kind="state", name=name, added_seconds=part(after).added_seconds, bound="link")

    after = state.with_tried(
        lever,
        {"state": StatePart(share=share)},
        fails="Optimizer state stays on the card",
        said="an optimizer's",
    )
    return after if after.plan.state is None else after.with_parts(state=part(after))


def _state_bytes(trace: Trace) -> int:
    """Of optimizers' state on the card, all that is ever made."""
    events = trace.events
    made = (events.kind == EventKind.ALLOC) & (events.storage >= 0)
    role = trace.storages.role[events.storage[made]]
    return int(events.bytes[made][role == Role.OPTIMIZER_STATE].sum())
