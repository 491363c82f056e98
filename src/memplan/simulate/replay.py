"""Replay of a trace or log from a file, as the report of `memplan simulate`."""

from __future__ import annotations

import dataclasses
import time

import msgspec
import numpy as np

from memplan.simulate.compare import SegmentComparison, compare_segments
from memplan.simulate.settings import AllocatorSettings
from memplan.simulate.settle import settled
from memplan.simulate.simulator import simulate
from memplan.simulate.start_state import infer_start
from memplan.simulate.timeline import Timeline
from memplan.types.trace import Trace


class ReplayReport(SegmentComparison):
    """Sizes in bytes."""

    allocated_peak_bytes: int
    """Peak of the blocks in use, inferred start memory included."""
    reserved_peak_bytes: int
    """Peak of the segments. Where the start was inferred from a log, without the memory held then,
    whose full extent the log does not show: this is the peak of the segments that the log could
    show. Where the start is known, with it, as `torch.cuda.max_memory_reserved` counts."""
    start_reserved_bytes: int
    """Segments held before the first event."""
    start_inferred: bool
    num_alloc_retries: int
    num_ooms: int
    oom_event: int | None
    fits: bool | None
    events: int
    repeated_steps: int
    """Steps of a captured job that were replayed once more, until the reserved peak settled."""
    seconds: float
    """Time of the replay itself, without reading the file."""


def with_start(
    trace: Trace, settings: AllocatorSettings | None = None, *, device: int = 0
) -> Trace:
    """The trace with inferred initial segments, if it is a log that names none."""
    if trace.meta.origin != "csv" or trace.meta.initial_segments:
        return trace
    start = infer_start(trace, settings, device=device)
    meta = msgspec.structs.replace(trace.meta, initial_segments=start)
    return dataclasses.replace(trace, meta=meta)


def replay_report(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
) -> ReplayReport:
    """Replay a trace and compare it with the device allocations that it holds, if any.

    Raises: as `simulate`.
    """
    started = with_start(trace, settings)
    inferred = started is not trace
    if settings is None:
        settings = AllocatorSettings.parse(trace.meta.alloc_conf)
    steady = settled(started, settings)
    started = steady.trace
    begin = time.perf_counter()
    timeline = simulate(started, settings, capacity_bytes=capacity_bytes)
    seconds = time.perf_counter() - begin
    return {
        "allocated_peak_bytes": timeline.own_allocated_peak_bytes,
        "reserved_peak_bytes": (
            grown_peak(timeline) if inferred else timeline.own_reserved_peak_bytes
        ),
        "start_reserved_bytes": timeline.start_reserved_bytes,
        "start_inferred": inferred,
        **compare_segments(started, timeline),
        "num_alloc_retries": timeline.num_alloc_retries,
        "num_ooms": timeline.num_ooms,
        "oom_event": timeline.oom_event,
        "fits": timeline.fits,
        "events": len(trace),
        "repeated_steps": steady.rounds * steady.steps,
        "seconds": seconds,
    }


def grown_peak(timeline: Timeline) -> int:
    """Peak of the segments that came after the start, whatever was held at the start."""
    segments = timeline.segments
    own = segments.event >= 0
    ended = own & (segments.freed_event >= 0)
    times = np.concatenate((segments.event[own], segments.freed_event[ended]))
    change = np.concatenate((segments.bytes[own], -segments.bytes[ended]))
    # What one event gives back makes room for what it asks for.
    order = np.lexsort((change, times))
    return int(np.cumsum(change[order]).max(initial=0))
