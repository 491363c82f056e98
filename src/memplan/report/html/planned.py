"""The layout of a plan beside what PyTorch's allocator would do with the same requests."""

from __future__ import annotations

import numpy as np

from memplan.report.html.picture import Blocks
from memplan.types.allocation import read_requests, rounded
from memplan.types.builder import TraceBuilder
from memplan.types.plan import AllocationPart
from memplan.types.trace import EventKind, Phase, Trace, TraceMeta


def planned_job(part: AllocationPart) -> tuple[Trace, Blocks]:
    """Setup and first round of a plan as a trace, and the places that the plan gives them; what
    it does not place is in the trace alone."""
    requests = read_requests(part)
    count, end = len(requests), part.start + part.clock
    upper = np.minimum(requests.upper, end)
    ends = np.flatnonzero(requests.upper < end)
    times = np.concatenate((upper[ends], requests.lower))
    # At one moment, what ends is gone before what begins.
    order = np.argsort(times, kind="stable")
    rows = np.concatenate((ends, np.arange(count)))[order]
    frees = order < len(ends)
    phases = [_phase(name) for name in part.phases]
    builder = TraceBuilder()
    storages = [builder.new_storage() for _ in range(count)]
    born, ended = np.zeros(count, np.int64), np.full(count, len(rows), np.int64)
    for event, (row, free) in enumerate(zip(rows.tolist(), frees.tolist(), strict=True)):
        if not free:
            phase = int(requests.phase[row])
            builder.phase = phases[phase] if phase >= 0 else Phase.SETUP
        kind = EventKind.FREE if free else EventKind.ALLOC
        builder.append(
            kind, storages[row], int(requests.bytes[row]), stream=int(requests.stream[row])
        )
        (ended if free else born)[row] = event
    placed = np.flatnonzero((requests.offset >= 0) & (requests.bytes > 0))
    blocks = Blocks(
        storage=placed,
        born=born[placed],
        ended=ended[placed],
        offset=requests.offset[placed],
        bytes=rounded(requests.bytes[placed]),
        ground=[(0, len(rows), 0, part.arena_bytes)],
        height=part.arena_bytes,
    )
    return builder.build(TraceMeta(origin="capture")), blocks


def _phase(name: str) -> Phase:
    """The phase of a name in a plan: `forward`, or `forward 2` for a later micro-batch."""
    known = {phase.name.lower(): phase for phase in Phase}
    return known.get(name.partition(" ")[0], Phase.OTHER)
