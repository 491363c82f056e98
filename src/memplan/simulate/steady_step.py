"""One captured step, as the allocator of a process meets it that trains on and on.

A capture of a step is a first step: libraries take the workspaces that they keep, and the cache is
empty. In a process that trains, the workspaces are there, and what is cached depends on what ran
before. A cached block of more than 1 MiB is handed out whole where less than 1 MiB would remain, so
the same requests allocate a little more or less in each process.
"""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import numpy as np

from memplan.simulate.repeat import Round, lifetimes, repeated
from memplan.simulate.settings import MIB, AllocatorSettings
from memplan.simulate.simulator import simulate
from memplan.types.trace import I64, EventKind, Events, Phase, Role, Segment, Trace

_ROUNDS = 3
_PASTS = 16
_DEVIATIONS = 3.0
_LARGE_REQUEST = 10 * MIB


def warmed(trace: Trace) -> Trace:
    """The trace of one step with the workspaces that libraries keep there before it, as they are
    from the second step on."""
    begun, gone = lifetimes(trace)
    start = _start(trace)
    workspace = trace.storages.role == Role.WORKSPACE
    kept = np.sort(begun[(begun >= start) & (gone < 0) & workspace])
    if not len(kept):
        return trace
    order = np.concatenate((np.arange(start), kept, np.delete(np.arange(len(trace)), kept)[start:]))
    events = _taken(trace.events, order)
    moved = slice(start, start + len(kept))
    events.op[moved], events.phase[moved] = -1, Phase.SETUP
    at = trace.ops.event
    behind = len(kept) - np.searchsorted(kept, at)
    ops = replace(trace.ops, event=at + np.where(at >= start, behind, 0))
    return replace(trace, events=events, ops=ops)


def steady_peak(trace: Trace, bounds: str = "expected") -> int:
    """The most bytes of PyTorch's `max_memory_allocated` in a step that is repeated, from the
    `warmed` trace of one: whole blocks, on every device.

    The step leaves what it was given as it was; what it left is released before the next one. The
    peak is that of a new process, or three standard deviations above the mean of processes that
    have other segments cached already, whichever is higher. `bounds` as in `simulate`.

    With the allocator of `cudaMallocAsync` a block is what was asked for.
    """
    settings = AllocatorSettings.parse(trace.meta.alloc_conf)
    longer = _trained_on(trace)
    devices = np.unique(trace.events.device).tolist()
    return sum(_device_peak(longer, settings, bounds, device) for device in devices)


def _device_peak(trace: Trace, settings: AllocatorSettings, bounds: str, device: int) -> int:
    if settings.backend != "native":
        native = replace(settings, backend="native")
        return simulate(trace, native, bounds=bounds, device=device).requested_peak_bytes
    peaks = []
    for segments in ([], *_pasts(trace, device)):
        meta = msgspec.structs.replace(trace.meta, initial_segments=segments)
        past = replace(trace, meta=meta)
        peaks.append(simulate(past, settings, bounds=bounds, device=device).allocated_peak_bytes)
    others = np.array(peaks[1:])
    return max(peaks[0], int(others.mean() + _DEVIATIONS * others.std()))


def _trained_on(trace: Trace) -> Trace:
    """The trace with its step repeated."""
    events = trace.events
    begun, gone = lifetimes(trace)
    start = _start(trace)
    before = begun < start
    frees = events.kind == EventKind.FREE
    kept = np.flatnonzero(~(frees & (events.storage >= 0) & before[events.storage]))
    left = np.flatnonzero(~before & (gone < 0))
    rows = np.concatenate((kept, begun[left]))
    step = _taken(events, rows)
    step.kind[len(kept) :] = EventKind.FREE
    stop = len(rows)
    once = replace(trace, events=step, ops=replace(trace.ops, event=trace.ops.event * 0))
    nothing = np.zeros(0, np.int64)
    of = Round(
        start=start,
        stop=stop,
        steps=1,
        rows=np.arange(start, stop),
        born=np.flatnonzero(~before),
        ended=nothing,
        successor=nothing,
        unmatched_bytes=0,
    )
    return repeated(once, of, _ROUNDS - 1)[0]


def _pasts(trace: Trace, device: int) -> list[list[Segment]]:
    """What may be cached before the first step: segments for some of its own requests."""
    events = trace.events
    asked = events.bytes[(events.kind == EventKind.ALLOC) & (events.device == device)]
    large = asked[asked > MIB]
    draw = np.random.default_rng(0)
    return [
        _cached(draw.choice(large, draw.integers(len(large))), device) if len(large) else []
        for _ in range(_PASTS)
    ]


def _cached(requests: I64, device: int) -> list[Segment]:
    sizes = np.where(
        requests < _LARGE_REQUEST, 2 * _LARGE_REQUEST, -(-requests // (2 * MIB)) * 2 * MIB
    )
    ends = np.cumsum(sizes)
    return [
        Segment(int(end - size), int(size), 0, device, [])
        for size, end in zip(sizes, ends, strict=True)
    ]


def _start(trace: Trace) -> int:
    """The event with which the step begins."""
    forward = np.flatnonzero(trace.events.phase != Phase.SETUP)
    return int(forward[0]) if len(forward) else len(trace)


def _taken(events: Events, rows: I64) -> Events:
    return Events(**{column.name: getattr(events, column.name)[rows] for column in fields(events)})
