"""Memory that a process held before its allocator log began, inferred from the log."""

from __future__ import annotations

from memplan.types.trace import Segment, Trace


def infer_start(trace: Trace) -> list[Segment]:
    """wip"""
    return []
