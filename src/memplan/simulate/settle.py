"""The allocator's steady state: the captured steps, repeated until its segments settle.

How memory fragments in a step depends on the holes that the steps before it left, so a job of many
steps may reserve more than the first few of them. The steady round is therefore replayed again and
again. It has settled once a repetition is given the very addresses of the one before: then every
later one is. Where no such fixed point is seen, some rounds without growth must do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memplan.simulate.batches import MadeUp, with_batches
from memplan.simulate.repeat import Round, find_round, repeated
from memplan.simulate.settings import AllocatorSettings
from memplan.simulate.simulator import simulate
from memplan.simulate.timeline import Timeline
from memplan.types.trace import I64, Trace

_FIRST_TRIES, _MOST_ROUNDS = 8, 64
_MOST_EVENTS = 1_000_000
"""The most events that repetitions may add: some tenths of a second."""
_LEAST_ORDERS, _MOST_ORDERS = 4, 16
_MOST_EVENTS_OF_ORDERS = 6_000_000
"""Together: a second or two."""
_QUIET_ROUNDS = 4
"""After so many rounds without growth no more is expected."""


@dataclass(frozen=True)
class Settled:
    """A job as it is replayed."""

    trace: Trace
    """The trace with the repetitions that raise the reserved peak, if any does."""
    captured: I64 | None = None
    """For each event of `trace` the captured one that it is or repeats; None if all are."""
    rounds: int = 0
    """Repetitions in `trace`."""
    steps: int = 0
    """Optimizer steps of one."""
    of_batches: bool = False
    """Whether they are a run over batches of different sizes."""
    turns: int = 0
    """Number of made-up turns of evaluation loops with such batches."""
    orders: int = 1
    """How many orders of the batches were tried, where each run draws its own: this is the one
    that reserves most."""
    least_reserved_bytes: int | None = None
    """The peak of the one of them that reserves least."""
    unsettled: str = ""
    """Why later steps may reserve more than these, in words; empty where they do not."""


def settled(trace: Trace, settings: AllocatorSettings) -> Settled:
    """The trace of a captured job as an allocator with these settings meets it in the long run.

    A trace whose steady steps are not known is taken as it is. Raises: as `simulate`.
    """
    # The state does not depend on the card as long as that has room.
    unlimited = replace(settings, per_process_memory_fraction=1.0)
    key = f"settled {unlimited}"
    found = trace._cache.get(key)
    if not isinstance(found, Settled):
        found = trace._cache[key] = _settle(trace, unlimited)
    return found


def _settle(trace: Trace, settings: AllocatorSettings) -> Settled:
    made_up = with_batches(trace)
    if made_up.steps:
        made_up, reserved = _worst_order(trace, made_up, settings)
        return Settled(
            made_up.trace,
            made_up.captured,
            made_up.steps,
            1,
            turns=made_up.turns,
            of_batches=True,
            orders=len(reserved),
            least_reserved_bytes=min(reserved, default=None),
        )
    if made_up.turns:
        found = _rounds(made_up.trace, settings)
        captured = made_up.captured if found.captured is None else made_up.captured[found.captured]
        return replace(found, captured=captured, turns=made_up.turns)
    return _rounds(trace, settings)


def _worst_order(
    trace: Trace, first: MadeUp, settings: AllocatorSettings
) -> tuple[MadeUp, list[int]]:
    """And the reserved peaks of all that were tried; none where the job fixes the order."""
    if not any(run.drawn for run in trace.meta.batches):
        return first, []
    count = min(max(_MOST_EVENTS_OF_ORDERS // len(first.trace), _LEAST_ORDERS), _MOST_ORDERS)
    worst, reserved = first, [int(simulate(first.trace, settings).reserved_peak_bytes)]
    for order in range(1, count):
        other = with_batches(trace, order)
        reserved.append(int(simulate(other.trace, settings).reserved_peak_bytes))
        worst = other if reserved[-1] == max(reserved) else worst
    return worst, reserved


def _rounds(trace: Trace, settings: AllocatorSettings) -> Settled:
    of = find_round(trace)
    if of is None or not len(of):
        return Settled(trace)
    if not of.recurs:
        return Settled(
            trace,
            unsettled=f"{of.unmatched_bytes:,} bytes that a steady step releases were not made by "
            "one like it, so more steps could not be simulated than were captured",
        )
    plain = simulate(trace, settings).reserved_peak_bytes
    most = max(min(_MOST_ROUNDS, _MOST_EVENTS // len(of)), _QUIET_ROUNDS)
    for times in sorted({min(_FIRST_TRIES, most), most}):
        longer, captured = repeated(trace, of, times)
        timeline = simulate(longer, settings)
        grew, settles = _growth(timeline, of, times)
        if settles:
            break
    unsettled = ""
    if not settles:
        unsettled = (
            f"reserved memory still grew after {times * of.steps} more steps were simulated; the "
            "peak is that of these, and a longer run may reserve more"
        )
    if timeline.reserved_peak_bytes <= plain:
        return Settled(trace, unsettled=unsettled)
    shorter, events = repeated(trace, of, grew)
    if simulate(shorter, settings).reserved_peak_bytes == timeline.reserved_peak_bytes:
        return Settled(shorter, events, grew, of.steps, unsettled=unsettled)
    return Settled(longer, captured, times, of.steps, unsettled=unsettled)


def _growth(timeline: Timeline, of: Round, times: int) -> tuple[int, bool]:
    """The last repetition that raised the reserved peak, or 0; and whether it has settled."""
    stop = of.stop
    peak, grew = int(timeline.reserved[:stop].max()), 0
    before = None
    for number in range(1, times + 1):
        part = slice(stop + (number - 1) * len(of), stop + number * len(of))
        reached = int(timeline.reserved[part].max())
        if reached > peak:
            peak, grew = reached, number
        addresses = timeline.address[part]
        if before is not None and np.array_equal(addresses, before):
            return grew, True
        before = addresses
    return grew, times - grew >= _QUIET_ROUNDS
