"""Jobs that take turns on the card with an inference engine: a peak for each stage, and the largest
share of the card that the engine may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from memplan.estimation.interval import Interval, margin_bytes
from memplan.simulate import Settled, Timeline
from memplan.types.device import DeviceProfile
from memplan.types.engines import Engine
from memplan.types.estimate import EngineEstimate, StagePeak
from memplan.types.trace import I64, EventKind, Phase, Role, Trace

_TRAINING = "training"
_SHOWN = ("engine start", "generation", "weight sync", _TRAINING)
_OF_SHARE = 100
"""Shares are given in hundredths."""

Judge = Callable[[Trace], bool]
"""Whether a trace fits the card at its high bound."""


def stage_peaks(steady: Settled, interval: Interval, card: DeviceProfile) -> list[StagePeak]:
    """What the card holds at most in each stage, the context included; empty for a job that only
    trains."""
    meta = steady.trace.meta
    if not meta.stages:
        return []
    stages = _stages(steady)
    likely, high = interval.expected.timeline, interval.high.timeline
    held = _engine_bytes(steady.trace, likely)
    more = interval.held[1] - interval.expected.reserved
    margin = margin_bytes(interval.reserved[1], meta.method)
    found = []
    for number, name in enumerate(_SHOWN):
        rows = np.flatnonzero(stages == number)
        if not len(rows):
            continue
        most = int(rows[likely.reserved[rows].argmax()])
        in_use = int(likely.allocated[rows].max())
        peak = max(int(likely.reserved[most]) + more, in_use) + card.context_bytes
        top = int(high.reserved[rows].max()) + card.context_high_bytes + margin
        found.append(
            StagePeak(
                stage=name,
                peak_bytes=peak,
                high_bytes=max(min(top, interval.peak[2]), peak),
                in_use_bytes=in_use + card.context_bytes,
                engine_bytes=int(held[most]),
                step=int(steady.trace.events.step[most]),
            )
        )
    return found


def _stages(steady: Settled) -> I64:
    """The stage of each event, as an index in `_SHOWN`; -1 for none."""
    trace = steady.trace
    captured = np.arange(len(trace)) if steady.captured is None else steady.captured
    events = int(captured.max(initial=-1)) + 1
    of = np.full(events, _SHOWN.index(_TRAINING), np.int64)
    for stage in sorted(trace.meta.stages, key=lambda one: (one.begin, -one.end)):
        of[stage.begin : stage.end] = _SHOWN.index(stage.name) if stage.name in _SHOWN else -1
    found = of[captured]
    found[(found == _SHOWN.index(_TRAINING)) & (trace.events.phase == Phase.SETUP)] = -1
    return found


def _engine_bytes(trace: Trace, timeline: Timeline) -> I64:
    """What engines hold after each event."""
    events = trace.events
    granted = np.diff(timeline.requested, prepend=timeline.start_requested_bytes)
    theirs = (events.storage >= 0) & (trace.storages.role[events.storage] == Role.ENGINE)
    return np.cumsum(np.where(theirs, granted, 0))


def engine_estimates(
    steady: Settled, interval: Interval, card: DeviceProfile | None, judge: Judge
) -> list[EngineEstimate]:
    """Each engine, and the largest share that fits `card`; None: no card was named."""
    found = []
    for engine in steady.trace.meta.engines:
        share, why = None, ""
        if (
            card is not None
            and engine.share_decides
            and engine.card_bytes == card.total_memory_bytes
        ):
            share, why = _largest_share(steady, engine, interval, card, judge)
        found.append(
            EngineEstimate(
                name=engine.name,
                model=engine.model,
                share=engine.share,
                weight_bytes=engine.weight_bytes,
                kv_cache_bytes=_kv_bytes(steady.trace, engine),
                sleeps=engine.sleeps,
                separate=engine.separate,
                largest_share=share,
                why=why,
            )
        )
    return found


def engine_notes(trace: Trace, card: DeviceProfile | None) -> list[str]:
    """Notes for a card other than the one for which an engine's share was computed."""
    return [
        f"the share of {engine.name} is that of a card of {engine.card_bytes:,} bytes, for which "
        "the job was captured: capture it again for another (--gpu)"
        for engine in trace.meta.engines
        if card is not None and engine.card_bytes != card.total_memory_bytes
    ]


def _largest_share(
    steady: Settled, engine: Engine, interval: Interval, card: DeviceProfile, judge: Judge
) -> tuple[float | None, str]:
    """The largest share that fits, in hundredths, rounded down; or None, with the reason why none
    fits. The memory that the card needs only grows with the share, so the share is found by
    bisection."""
    numbers = range(1, _OF_SHARE + 1)
    least = next(
        (n for n in numbers if engine.kv_bytes(n / _OF_SHARE).low >= engine.least_bytes), None
    )
    if least is None:
        return None, "the card is too small for its weights and the KV cache of one sequence"
    most = _free_at_start(steady, engine, interval, card) * _OF_SHARE // engine.card_bytes
    needs = f"it needs {least / _OF_SHARE:.2f} for weights, activations and one sequence"
    if most < least:
        return None, f"{needs}; {max(most, 0) / _OF_SHARE:.2f} is free when it starts"
    if not judge(_at_share(steady.trace, engine, least / _OF_SHARE)):
        return None, f"{needs}, which does not fit beside the training"
    fits, fails = least, most + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if judge(_at_share(steady.trace, engine, middle / _OF_SHARE)):
            fits = middle
        else:
            fails = middle
    return fits / _OF_SHARE, ""


def _free_at_start(steady: Settled, engine: Engine, interval: Interval, card: DeviceProfile) -> int:
    """Bytes of the card when the engine begins, at the high bound of the rest."""
    timeline = interval.high.timeline
    reserved = int(timeline.reserved[engine.begin - 1]) if engine.begin else 0
    taken = reserved + card.context_high_bytes + margin_bytes(reserved, steady.trace.meta.method)
    return card.total_memory_bytes - taken


def _kv_rows(trace: Trace, engine: Engine) -> I64:
    """Events that begin or end its KV cache."""
    events, name = trace.events, f"{engine.name}.kv_cache"
    if name not in trace.strings:
        return np.zeros(0, np.int64)
    caches = trace.storages.name == trace.strings.index(name)
    moves = (events.kind == EventKind.ALLOC) | (events.kind == EventKind.FREE)
    return np.flatnonzero(moves & (events.storage >= 0) & caches[events.storage])


def _kv_bytes(trace: Trace, engine: Engine) -> int:
    return int(trace.events.bytes[_kv_rows(trace, engine)].max(initial=0)) * engine.layers


def _at_share(trace: Trace, engine: Engine, share: float) -> Trace:
    """The job with another share of the card for the engine."""
    rows = _kv_rows(trace, engine)
    sizes = engine.kv_bytes(share).at_least(engine.least_bytes).divided(engine.layers)
    columns = {}
    for name, size in (
        ("bytes_low", sizes.low), ("bytes", sizes.expected), ("bytes_high", sizes.high)
    ):  # fmt: skip
        column = getattr(trace.events, name).copy()
        column[rows] = size
        columns[name] = column
    return replace(trace, events=replace(trace.events, **columns))
