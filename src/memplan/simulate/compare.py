"""Predicted device allocations against those that a log observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

import numpy as np

from memplan.simulate.timeline import Timeline
from memplan.types.trace import EventKind, Trace

_GROWTH = (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_MAP)

Growth = tuple[int, int, int, int]
"""Event of the request served, `EventKind` number, bytes, stream."""


class SegmentComparison(TypedDict):
    """How many device allocations (`SEGMENT_ALLOC`, `SEGMENT_MAP`) agree."""

    segments_logged: int
    segments_predicted: int
    segments_matched: int
    """Logged segments predicted for the same request, with the same size and stream."""
    first_difference: int | None
    """Event of the first request for which the two differ."""


def compare_segments(trace: Trace, timeline: Timeline) -> SegmentComparison:
    """Compare the device allocations of a log with those of its replay.

    A logged one belongs to the next allocation of its device, which it was made to serve: events
    are logged under the allocator's lock, so nothing of another thread comes between.
    """
    logged = _logged(trace, timeline.device)
    log = timeline.segment_events
    grown = (log.event >= 0) & np.isin(log.kind, _GROWTH)
    predicted = _rows(log.event[grown], log.kind[grown], log.bytes[grown], log.stream[grown])
    matched = Counter(logged) & Counter(predicted)
    difference = (Counter(logged) - Counter(predicted)) + (Counter(predicted) - Counter(logged))
    return {
        "segments_logged": len(logged),
        "segments_predicted": len(predicted),
        "segments_matched": matched.total(),
        "first_difference": min((row[0] for row in difference), default=None),
    }


def _logged(trace: Trace, device: int) -> list[Growth]:
    events = trace.events
    here = events.device == device
    rows = np.flatnonzero(here & np.isin(events.kind, _GROWTH))
    # A request that failed in the end may have made expandable segments grow too.
    requests = np.flatnonzero(
        here & np.isin(events.kind, (EventKind.ALLOC, EventKind.OUT_OF_MEMORY))
    )
    served = np.append(requests, len(trace))[np.searchsorted(requests, rows)]
    return _rows(served, events.kind[rows], events.bytes[rows], events.stream[rows])


def _rows(*columns: np.ndarray) -> list[Growth]:
    values: Iterable[Growth] = zip(*(column.tolist() for column in columns), strict=True)
    return list(values)
