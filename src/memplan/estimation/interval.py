"""Low, expected and high peaks: the same trace replayed several times.

How much an allocator reserves depends chaotically on the sizes it is asked for: a workspace a
little larger can cost a segment or save one. A single replay with uncertain sizes is therefore one
draw of many. The trace is replayed with its uncertain sizes at several points between low and
expected. The expected value is what is allocated at the expected sizes, and the middle one of what
these replays reserve beyond what they allocate. The interval spans them all and the high sizes with
the latest reuse of memory that several streams used.

Where a router's choices decide sizes, replays with other choices are spanned too (`choices`), and
so are other orders of a job's batches where each run draws its own (`simulate.settle`).

Even a trace in which everything was observed leaves a margin, because a real run is not repeated
to the byte: library handles take blocks in another order, threads interleave, kernels differ
between releases. The margin is one large segment (20 MiB, the allocator's own granularity) plus
4 % of the reserved peak on each side: published repeats of one job differ by up to 4 %
(`bench/results/accuracy.json` says how many measured jobs lie within).

Near a card's limit the allocator returns cached segments to the device and tries again, and
kernels make do with smaller workspaces, so how much is reserved depends on the card. A replay that
passes the room left on the card is therefore repeated against that room; only when that fails too
does the job not fit, and the unlimited replay says how much it would need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from memplan.estimation.choices import uneven
from memplan.simulate import AllocatorSettings, Timeline, simulate
from memplan.types.device import DeviceProfile
from memplan.types.trace import EventKind, Trace

MARGIN_BYTES = 20 << 20
MARGIN_FRACTION = 0.04
FALLBACK_FRACTION = 0.20
"""The interval's half width where fake CUDA does not work and CPU kernels were traced instead:
published errors of estimators that do so have a median of 20 to 24 % (xMem's table, arXiv
2510.21048)."""
_SHARES = (0.25, 0.5, 0.75)
"""Points between the low and the expected sizes that are replayed beside these two."""


@dataclass(frozen=True)
class Replay:
    """One replay of the trace."""

    timeline: Timeline
    fits: bool
    """False when the device ran out even after the caches were given back."""
    squeezed: bool
    """It fits only because cached segments were given back or workspaces made smaller."""

    @property
    def reserved(self) -> int:
        """Reserved bytes, with what others hold on the card."""
        return int(self.timeline.reserved_peak_bytes)

    @property
    def own_reserved(self) -> int:
        return int(self.timeline.own_reserved_peak_bytes)

    @property
    def own_allocated(self) -> int:
        return int(self.timeline.own_allocated_peak_bytes)


@dataclass(frozen=True)
class Interval:
    """Peaks of one process, low <= expected <= high for each of the three totals."""

    expected: Replay
    """The replay at expected sizes, which gives the allocated bytes that are likely. The likely
    reserved bytes are the middle of several replays (`held`)."""
    high: Replay
    held: tuple[int, int, int]
    """Low, expected, high bytes, the margin included: of PyTorch's allocator, and of others that
    the trace names, together."""
    reserved: tuple[int, int, int]
    """Low, likely and high reserved bytes of PyTorch's allocator."""
    allocated: tuple[int, int, int]
    peak: tuple[int, int, int]
    """Held plus the context."""


def margin_bytes(reserved: int, method: str = "fake-cuda") -> int:
    """What a repeat of the same run may differ by; see the module's text."""
    fraction = FALLBACK_FRACTION if method == "fake-cpu" else MARGIN_FRACTION
    return MARGIN_BYTES + int(reserved * fraction)


def find_interval(
    trace: Trace,
    profile: DeviceProfile,
    player: Player,
    *,
    limited: bool,
    least: int | None = None,
) -> Interval:
    """Replay the trace. `limited`: whether the card's size binds; `least`: bytes that another order
    of the job's batches reserves."""
    drawn = [
        player.play(sizes, "expected", "earliest", profile.context_bytes) for sizes in _draws(trace)
    ]
    expected = drawn[0]
    more = _likely_reserved(drawn) - expected.reserved
    margin = margin_bytes(expected.own_reserved + more, trace.meta.method)
    high = expected
    if _varies(trace) or limited:
        taken = profile.context_high_bytes + margin
        high = player.play(trace, "high", "latest", taken)
    context = profile.context_bytes
    routed = [player.play(one, "expected", "earliest", context) for one in uneven(trace)]
    played = [*drawn, high, *routed]
    totals = [replay.reserved for replay in played] + ([] if least is None else [least])
    held = reserved = _span(totals, expected.reserved + more, margin)
    if expected.own_reserved != expected.reserved:
        own = [replay.own_reserved for replay in played]
        reserved = _span(own, expected.own_reserved + more, margin)
    peak, top = held[1] + profile.context_bytes, held[2] + profile.context_high_bytes
    if limited and all(replay.fits for replay in played):
        # Each replay was held to the room beside its own context, so none needs more than the
        # card, unless the context alone does.
        top = max(min(top, profile.total_memory_bytes), peak)
    return Interval(
        expected=expected,
        high=high,
        held=held,
        reserved=reserved,
        allocated=_span(
            [replay.own_allocated for replay in played], expected.own_allocated, margin
        ),
        peak=(held[0] + profile.context_low_bytes, peak, top),
    )


def _likely_reserved(drawn: list[Replay]) -> int:
    """What one of the replays reserves, for segments are reserved whole: the one nearest to what
    the first allocates and the median of the fragmentation of them all. At least what the first
    allocates."""
    allocated = drawn[0].timeline.allocated_peak_bytes
    likely = allocated + sorted(map(_fragmentation, drawn))[len(drawn) // 2]
    nearest = min((replay.reserved for replay in drawn), key=lambda one: abs(one - likely))
    return max(nearest, allocated)


def _fragmentation(replay: Replay) -> int:
    return replay.reserved - replay.timeline.allocated_peak_bytes


def _span(totals: list[int], expected: int, margin: int) -> tuple[int, int, int]:
    """Low, expected and high. The allocator is not monotone: smaller requests can fragment more,
    hence the least and the largest of all replays."""
    return max(min(totals) - margin, 0), expected, max(totals) + margin


def _draws(trace: Trace) -> Iterator[Trace]:
    """The trace with its uncertain sizes at expected, at low and in between."""
    yield trace
    events = trace.events
    uncertain = events.bytes - events.bytes_low
    if not uncertain.any():
        return
    for share in (0.0, *_SHARES):
        sizes = events.bytes_low + (uncertain * share).astype(np.int64)
        yield replace(trace, events=replace(events, bytes=sizes))


def _varies(trace: Trace) -> bool:
    events = trace.events
    return bool(
        np.any(events.bytes_low != events.bytes)
        or np.any(events.bytes_high != events.bytes)
        or np.any(events.kind == EventKind.RECORD_STREAM)
    )


class Player(Protocol):
    """Replays traces for one card, under one allocator."""

    def play(self, trace: Trace, bounds: str, reuse: str, taken: int) -> Replay:
        """One replay, beside `taken` bytes of the process that are not the allocator's. `bounds`
        and `reuse`: as of `simulate`."""


@dataclass(frozen=True)
class CachingPlayer:
    """PyTorch's own allocator, replayed for one card."""

    settings: AllocatorSettings
    card: DeviceProfile
    total: int | None
    """The card's memory where it binds; None: no limit."""

    def play(self, trace: Trace, bounds: str, reuse: str, taken: int) -> Replay:
        """See `Player`."""
        settings = self.settings
        # The card's size matters to an unlimited replay only where the settings take a part of it.
        part = self.card.total_memory_bytes if settings.per_process_memory_fraction < 1.0 else None
        free = simulate(trace, settings, device_bytes=part, bounds=bounds, reuse=reuse)
        if free.oom_event is not None:
            return Replay(free, fits=False, squeezed=False)
        room = None if self.total is None else max(self.total - taken, 0)
        if room is None or free.reserved_peak_bytes <= room:
            return Replay(free, fits=True, squeezed=free.num_alloc_retries > 0)
        tight = simulate(
            trace,
            settings,
            capacity_bytes=room,
            device_bytes=self.total,
            bounds=bounds,
            reuse=reuse,
        )
        if tight.oom_event is None:
            return Replay(tight, fits=True, squeezed=True)
        return Replay(free, fits=False, squeezed=False)
