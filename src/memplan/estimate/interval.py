"""Low, expected and high peaks: the same trace replayed three times.

The expected replay takes every size as recorded. The low one takes the low sizes (they differ
where an event was derived by a rule or assumed) and lets memory used on several streams be reused
at once; the high one takes the high sizes and the latest reuse.

Even a trace in which everything was observed leaves a margin, because a real run is not repeated
to the byte: library handles take blocks in another order, threads interleave, and published
repeats of one job differ by up to 2 %. The margin is one large segment (20 MiB, the allocator's
own granularity) plus 1 % of the reserved peak, on each side.

Near a card's limit the allocator returns cached segments to the device and tries again, so how
much it reserves depends on the card. A replay that passes the room left on the card is therefore
repeated against that room; only when that fails too does the job not fit, and the unlimited replay
says how much it would need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from memplan.simulate import AllocatorSettings, Timeline, simulate
from memplan.types.device import DeviceProfile
from memplan.types.trace import EventKind, Trace

MARGIN_BYTES = 20 << 20
MARGIN_FRACTION = 0.01


@dataclass(frozen=True)
class Replay:
    """One replay of the trace."""

    timeline: Timeline
    fits: bool
    """False when the device ran out even after the caches were given back."""
    squeezed: bool
    """It fits only because cached segments were given back."""

    @property
    def reserved(self) -> int:
        return int(self.timeline.reserved_peak_bytes)

    @property
    def allocated(self) -> int:
        return int(self.timeline.allocated_peak_bytes)


@dataclass(frozen=True)
class Interval:
    """Peaks of one process, low <= expected <= high for each of the three totals."""

    expected: Replay
    high: Replay
    reserved: tuple[int, int, int]
    """Low, expected, high bytes, the margin included."""
    allocated: tuple[int, int, int]
    peak: tuple[int, int, int]
    """Reserved plus the context."""


def margin_bytes(reserved: int) -> int:
    """What a repeat of the same run may differ by; see the module's text."""
    return MARGIN_BYTES + int(reserved * MARGIN_FRACTION)


def find_interval(
    trace: Trace,
    settings: AllocatorSettings,
    profile: DeviceProfile,
    *,
    limited: bool,
) -> Interval:
    """Replay the trace three times. `limited`: whether the card's size binds."""
    total = profile.total_memory_bytes if limited else None
    replay = partial(_replay, trace, settings, card=profile)
    expected = replay("expected", "earliest", room=_room(total, profile.context_bytes))
    margin = margin_bytes(expected.reserved)
    low = high = expected
    if _varies(trace):
        low = replay("low", "earliest", room=_room(total, profile.context_low_bytes))
    if _varies(trace) or limited:
        room = _room(total, profile.context_high_bytes + margin)
        high = replay("high", "latest", room=room)
    # The allocator is not monotone: smaller requests can fragment more. Hence the min and max.
    reserved = (
        max(min(low.reserved, expected.reserved) - margin, min(low.allocated, expected.allocated)),
        expected.reserved,
        max(high.reserved, expected.reserved) + margin,
    )
    return Interval(
        expected=expected,
        high=high,
        reserved=reserved,
        allocated=(
            min(low.allocated, expected.allocated),
            expected.allocated,
            max(high.allocated, expected.allocated),
        ),
        peak=(
            reserved[0] + profile.context_low_bytes,
            reserved[1] + profile.context_bytes,
            reserved[2] + profile.context_high_bytes,
        ),
    )


def _room(total: int | None, taken: int) -> int | None:
    return None if total is None else max(total - taken, 0)


def _varies(trace: Trace) -> bool:
    events = trace.events
    return bool(
        np.any(events.bytes_low != events.bytes)
        or np.any(events.bytes_high != events.bytes)
        or np.any(events.kind == EventKind.RECORD_STREAM)
    )


def _replay(
    trace: Trace,
    settings: AllocatorSettings,
    bounds: str,
    reuse: str,
    *,
    card: DeviceProfile,
    room: int | None,
) -> Replay:
    total = card.total_memory_bytes
    # The card's size matters to an unlimited replay only where the settings take a part of it.
    part = total if settings.per_process_memory_fraction < 1.0 else None
    free = simulate(trace, settings, device_bytes=part, bounds=bounds, reuse=reuse)
    if free.oom_event is not None:
        return Replay(free, fits=False, squeezed=False)
    if room is None or free.reserved_peak_bytes <= room:
        return Replay(free, fits=True, squeezed=free.num_alloc_retries > 0)
    tight = simulate(
        trace, settings, capacity_bytes=room, device_bytes=total, bounds=bounds, reuse=reuse
    )
    if tight.oom_event is None:
        return Replay(tight, fits=True, squeezed=True)
    return Replay(free, fits=False, squeezed=False)
