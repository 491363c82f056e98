"""Replay of a `Trace` through the rules of PyTorch's CUDA caching allocator, in native code."""

from __future__ import annotations

from typing import Any

import numpy as np

import memplan._native as _native
from memplan.simulate.initial import initial_rows
from memplan.simulate.settings import UNLIMITED, AllocatorSettings
from memplan.simulate.timeline import Timeline, segment_events
from memplan.types.errors import FormatError, NoAnswerError, UsageError
from memplan.types.trace import I64, EventKind, Provenance, Role, Trace

BOUNDS = {"expected": "bytes", "low": "bytes_low", "high": "bytes_high"}
REUSES = ("latest", "earliest")

_UNKNOWN_DEVICE_RESERVE = 1 << 40
"""Address space of an expandable segment when the device's memory is not known."""


def simulate(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
    device_bytes: int | None = None,
    bounds: str = "expected",
    reuse: str = "latest",
    device: int = 0,
) -> Timeline:
    """What the allocator holds after each event of one device.

    Args:
        settings: the allocator's; default: those that the trace says were in force.
        capacity_bytes: what the device can give to segments: its memory without the context,
            libraries and other processes. None: no limit.
        device_bytes: total memory of the device, of which `per_process_memory_fraction` is a
            fraction and an expandable segment reserves 9/8. Default: `capacity_bytes`.
        bounds: which sizes of the events to use: `expected`, `low` or `high`.
        reuse: when memory that another stream recorded may be used again after its release.
            `earliest`: at once, as if that stream had already passed. `latest`: when the host is
            known to have waited for that stream (`SYNCHRONIZE`, directly or through events), or
            when an out-of-memory retry or `EMPTY_CACHE` waits for all. Storages for which the
            trace holds a `FREE_COMPLETED` follow that instead.

    Raises:
        UsageError: an argument that does not exist.
        FormatError: events that cannot be, such as a storage that begins twice.
        NoAnswerError: a memory fraction without a device size, or another allocator backend.
    """
    if bounds not in BOUNDS:
        raise UsageError(f"bounds {bounds!r}", f"one of {', '.join(BOUNDS)}")
    if reuse not in REUSES:
        raise UsageError(f"reuse {reuse!r}", f"one of {', '.join(REUSES)}")
    if settings is None:
        settings = AllocatorSettings.parse(trace.meta.alloc_conf)
    limits = _native_settings(settings, capacity_bytes, device_bytes or capacity_bytes)
    segments, blocks = initial_rows(trace, settings, device)
    columns, summary = _replay(trace, limits, segments, blocks, bounds, reuse, device)
    alloc_event, free_event = _lifetimes(trace, blocks, device)
    start = summary["start"]
    initial = segments.reshape(-1, 5)
    log = [
        (-1, EventKind.SEGMENT_MAP if expandable else EventKind.SEGMENT_ALLOC, size, stream, where)
        for where, size, stream, _, expandable in initial.tolist()
    ]
    return Timeline(
        settings=settings,
        device=device,
        capacity_bytes=capacity_bytes,
        **columns,
        start_requested_bytes=start["requested"],
        start_allocated_bytes=start["allocated"],
        start_reserved_bytes=start["reserved"],
        segment_events=segment_events(log + summary["segment_events"]),
        num_alloc_retries=summary["num_alloc_retries"],
        oom_event=summary["oom_event"] if summary["oom_event"] >= 0 else None,
        oom_bytes=summary["oom_bytes"],
        unknown_frees=summary["unknown_frees"],
        alloc_event=alloc_event,
        free_event=free_event,
    )


def _replay(
    trace: Trace,
    limits: Any,
    segments: I64,
    blocks: I64,
    bounds: str,
    reuse: str,
    device: int,
) -> tuple[dict[str, Any], _native.ReplaySummary]:
    """Columns with what holds after each event, and the totals of the native replay."""
    events = trace.events
    columns = {
        name: np.empty(len(trace), dtype=np.int64)
        for name in ("requested", "allocated", "active", "reserved", "address")
    }
    try:
        summary = _native.replay(
            kind=np.ascontiguousarray(events.kind),
            storage=np.ascontiguousarray(events.storage),
            bytes=np.ascontiguousarray(getattr(events, BOUNDS[bounds])),
            least=least_bytes(trace, bounds),
            stream=np.ascontiguousarray(events.stream),
            device=np.ascontiguousarray(events.device),
            aux=np.ascontiguousarray(events.aux),
            segments=segments,
            blocks=blocks,
            settings=limits,
            storages=len(trace.storages),
            device_index=device,
            reuse_early=reuse == "earliest",
            **columns,
        )
    except (ValueError, OverflowError) as error:
        raise FormatError(f"trace: {error}", "the file is damaged or not a memory trace") from None
    return columns, summary


def least_bytes(trace: Trace, bounds: str) -> I64:
    """What each request can do with when the device has no more.

    A kernel whose workspace is derived by a rule has plans with smaller ones, down to its low
    size: PyTorch tries the next plan when a workspace cannot be had (`native/cudnn/Conv_v8.cpp`).
    Another size that a rule gives (an RNN's reserve) is uncertain, and nothing can be chosen.
    """
    events = trace.events
    sizes: I64 = getattr(events, BOUNDS[bounds])
    workspaces = np.flatnonzero(trace.storages.role == Role.WORKSPACE)
    chosen = (events.provenance == Provenance.RULE) & np.isin(events.storage, workspaces)
    return np.where(chosen, events.bytes_low, sizes)


def _native_settings(
    settings: AllocatorSettings, capacity: int | None, total: int | None
) -> _native.ReplaySettings:
    if settings.backend != "native":
        raise NoAnswerError(
            f"allocator backend {settings.backend} cannot be simulated", "use backend:native"
        )
    allowed = UNLIMITED
    if settings.per_process_memory_fraction < 1.0:
        if total is None:
            raise NoAnswerError(
                "per_process_memory_fraction is set but the device's memory is not known",
                "name the GPU or its size",
            )
        allowed = int(settings.per_process_memory_fraction * float(total))
    return {
        "expandable_segments": settings.expandable_segments,
        "throw_on_cudamalloc_oom": settings.throw_on_cudamalloc_oom,
        "max_split_size": settings.max_split_size
        if settings.max_split_size < 1 << 50
        else UNLIMITED,
        "max_non_split_rounding": min(settings.max_non_split_rounding, 1 << 50),
        "large_segment_size": min(settings.large_segment_size, 1 << 40),
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "roundup_divisions": settings.roundup_power2_divisions,
        "allowed_bytes": allowed,
        "capacity_bytes": UNLIMITED if capacity is None else max(capacity, 0),
        "reserve_bytes": _UNKNOWN_DEVICE_RESERVE if total is None else total + total // 8,
    }


def _lifetimes(trace: Trace, blocks: I64, device: int) -> tuple[I64, I64]:
    """Events of allocation and release by storage, on one device."""
    events = trace.events
    alloc_event = np.full(len(trace.storages), -2, dtype=np.int64)
    free_event = np.full(len(trace.storages), -1, dtype=np.int64)
    residents = blocks.reshape(-1, 5)[:, 4]
    alloc_event[residents[residents >= 0]] = -1
    here = (events.device == device) & (events.storage >= 0)
    begun = np.flatnonzero(here & (events.kind == EventKind.ALLOC))
    alloc_event[events.storage[begun]] = begun
    # Reversed, so that the first of several stays.
    ended = np.flatnonzero(
        here & ((events.kind == EventKind.FREE) | (events.kind == EventKind.FREE_COMPLETED))
    )[::-1]
    free_event[events.storage[ended]] = ended
    return alloc_event, free_event
