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
from typing import Literal

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
    expected = _replay(trace, settings, "expected", "earliest", _room(total, profile.context_bytes))
    margin = margin_bytes(expected.reserved)
    low = high = expected
    if _varies(trace):
        room = _room(total, profile.context_low_bytes)
        low = _replay(trace, settings, "low", "earliest", room)
    if _varies(trace) or limited:
        room = _room(total, profile.context_high_bytes + margin)
        high = _replay(trace, settings, "high", "latest", room)
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
    bounds: Literal["expected", "low", "high"],
    reuse: Literal["earliest", "latest"],
    room: int | None,
) -> Replay:
    free = simulate(trace, settings, bounds=bounds, reuse=reuse)
    if room is None or free.reserved_peak_bytes <= room:
        return Replay(free, fits=True, squeezed=False)
    tight = simulate(trace, settings, capacity_bytes=room, bounds=bounds, reuse=reuse)
    if tight.oom_event is None:
        return Replay(tight, fits=True, squeezed=True)
    return Replay(free, fits=False, squeezed=False)
