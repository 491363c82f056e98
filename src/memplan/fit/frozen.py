"""The lever of weights that are not trained: in the host's memory, copied to the card for each
use."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np

from memplan.fit.answer import Lever
from memplan.fit.state import State, step_range
from memplan.phases.passes import AGAIN
from memplan.report.text import format_bytes
from memplan.timing.seconds import fetches, op_seconds
from memplan.timing.workload import storage_bytes
from memplan.types.device import DeviceProfile
from memplan.types.errors import NoAnswerError
from memplan.types.plan import FrozenPart
from memplan.types.step_graph import Bools
from memplan.types.trace import PAGE_LOCKED, EventKind, HostEventKind, Phase, Role, Trace

SMALLEST = 1 << 20
"""Bytes of a weight that goes to the host (`runtime.frozen`)."""
_WORTH = 0.01
"""Frozen weights with a smaller share of what the job needs are not moved."""
_HIDDEN = 0.5
"""This lever is tried early if copies take at most this share of the operators' time."""


def with_frozen_on_host(state: State) -> State:
    """The job with as much of its frozen weights on the host as it takes to fit, all of it where it
    fits without; as it is, with a sentence, where there is none or the script fails with it."""
    sizes = frozen_bytes(state.captured.trace)
    share, largest = _shares(state, sizes)
    if not share:
        return state
    found = _tried(state, share, max(sizes))
    if not found.fits and found.plan.frozen is not None and found.plan.frozen.share < largest:
        found = _tried(state, largest, max(sizes))
    return found


def hides(state: State) -> bool:
    """Whether its copies should take so much less than the step's operators that these hardly ever
    wait: then it is tried first."""
    trace = state.captured.trace
    sizes = frozen_bytes(trace)
    share, _ = _shares(state, sizes)
    uses = 3 if (trace.ops.call == AGAIN).any() else 2  # a checkpointed block runs twice
    seconds = uses * share * sum(sizes) / state.job.profile.host_link_bytes_per_second
    with suppress(NoAnswerError):
        return 0 < seconds < _HIDDEN * state.step_seconds()
    return False


def _shares(state: State, sizes: list[int]) -> tuple[float, float]:
    """The share of frozen weights to begin with, 0 for none, and the largest."""
    compiled = state.captured.trace.meta.regions or state.plan.regions is not None
    if compiled or sum(sizes) < _WORTH * state.needed:
        return 0.0, 0.0
    missing = state.needed - state.job.profile.total_memory_bytes + 2 * max(sizes)
    return state.shares_for_host(sum(sizes), missing)


def _tried(state: State, share: float, ahead: int) -> State:
    before = _locked_bytes(state.captured.trace)

    def part(after: State) -> FrozenPart:
        trace = after.captured.trace
        return FrozenPart(
            share=share,
            ahead_bytes=ahead,
            host_bytes=_locked_bytes(trace) - before,
            added_seconds=waiting_seconds(trace, after.job.profile),
        )

    def lever(after: State) -> Lever:
        made = part(after)
        return Lever(
            kind="frozen",
            name=f"{format_bytes(made.host_bytes)} on the host",
            added_seconds=made.added_seconds,
            bound="link",
        )

    after = state.with_tried(
        lever,
        {"frozen": FrozenPart(share=share, ahead_bytes=ahead)},
        fails="Frozen weights stay on the card",
    )
    return after if after.plan.frozen is None else after.with_parts(frozen=part(after))


def frozen_bytes(trace: Trace) -> list[int]:
    """Bytes of each large parameter that gets no gradient. Parameters and gradients are counted by
    shape, because a trace does not say which gradient belongs to which. Empty where there is no
    step."""
    step = step_range(trace)
    if step is None:
        return []
    size = storage_bytes(trace)
    kinds = list(zip(trace.storages.shape.tolist(), size.tolist(), strict=True))
    events = trace.events
    made = (events.kind == EventKind.ALLOC) & (events.storage >= 0)
    gone = (events.kind == EventKind.FREE) & (events.storage >= 0)
    begin = np.full(len(size), len(events.kind))
    end = begin.copy()
    begin[events.storage[made]] = np.flatnonzero(made)
    end[events.storage[gone]] = np.flatnonzero(gone)
    start, stop = step
    stays = (begin < start) & (end >= stop)
    role = trace.storages.role
    large = (role == Role.PARAMETER) & (size >= SMALLEST) & stays & ~_updated(trace)
    given = (role == Role.GRADIENT) & (stays | ((begin >= start) & (begin < stop)))
    parameters = Counter(kinds[one] for one in np.flatnonzero(large).tolist())
    parameters.subtract(kinds[one] for one in np.flatnonzero(given).tolist())
    return [nbytes for (_, nbytes), count in parameters.items() for _ in range(count)]


def _updated(trace: Trace) -> Bools:
    """Storages that the optimizer writes, or operators of backward passes: where weights are
    updated there, gradients are gone before the step and have no role. FSDP2's gradients lie in
    storages of another shape than their weights."""
    ops = trace.ops
    updates = np.isin(ops.phase, (Phase.BACKWARD, Phase.OPTIMIZER))
    writes = np.repeat(updates, np.diff(ops.writes_start))
    written = np.zeros(len(trace.storages), bool)
    written[ops.writes[writes]] = True
    return written


def _locked_bytes(trace: Trace) -> int:
    """Page-locked as it is, of all that ever was."""
    host = trace.host
    made = (host.kind == HostEventKind.ALLOC) & (host.pinned == PAGE_LOCKED)
    return int(host.bytes[made].sum())


def waiting_seconds(trace: Trace, profile: DeviceProfile) -> float:
    """How long the operators of the steady step wait for weights: copies go one at a time beside
    them, each from the row on where the capture shows its begin. What is read on the host itself is
    waited for whole, but for rows of embeddings."""
    step = step_range(trace)
    if step is None:
        return 0.0
    ops = trace.ops
    first, last = np.searchsorted(ops.event, step).tolist()
    seconds, fetched = op_seconds(trace, profile, first, last), fetches(trace)[first:last]
    link = profile.host_link_bytes_per_second
    size, away = storage_bytes(trace), _gone_before(trace, step[0])
    arrival: dict[int, float] = {}
    now = free = 0.0
    for row in range(first, last):
        if fetched[row - first]:
            free = max(free, now) + float(seconds[row - first])
            arrival[int(ops.writes[ops.writes_start[row]])] = free
            continue
        reads = ops.reads[ops.reads_start[row] : ops.reads_start[row + 1]].tolist()
        now = max([now, *(arrival.pop(one) for one in reads if one in arrival)])
        if "embedding" not in trace.strings[ops.name[row]]:
            now += sum(int(size[one]) for one in reads if away[one]) / link
        now += float(seconds[row - first])
    return max(0.0, now - float(seconds[~fetched].sum()))


def _gone_before(trace: Trace, event: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Storages whose memory was let go of before an event."""
    events = trace.events
    kind, storage = events.kind[:event], events.storage[:event]
    gone = np.zeros(len(trace.storages), bool)
    gone[storage[(kind == EventKind.FREE) & (storage >= 0)]] = True
    return gone
