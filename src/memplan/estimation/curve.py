"""Memory over time, thinned for a plot."""

from __future__ import annotations

import numpy as np

from memplan.simulate import Timeline
from memplan.types.estimate import MemoryCurve
from memplan.types.trace import Trace

POINTS = 200


def thin(trace: Trace, timeline: Timeline, points: int = POINTS) -> MemoryCurve:
    """The curve in at most `points` buckets of equal width in events. Each keeps its maximum, so
    that no peak is lost."""
    count = min(points, len(trace))
    if count == 0:
        return MemoryCurve(events=[], steps=[], allocated_bytes=[], reserved_bytes=[])
    starts = np.arange(count, dtype=np.int64) * len(trace) // count
    return MemoryCurve(
        events=starts.tolist(),
        steps=trace.events.step[starts].tolist(),
        allocated_bytes=np.maximum.reduceat(timeline.allocated, starts).tolist(),
        reserved_bytes=np.maximum.reduceat(timeline.reserved, starts).tolist(),
    )
