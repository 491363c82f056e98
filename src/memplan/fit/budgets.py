"""Which budget to plan for next, from what the captured attempts say.

A solver counts the requested bytes of a step. A card has to hold more: blocks are rounded, segments
are cut, the context and the margin of the estimate come on top, and how much that is depends on the
very requests that a plan changes. So the budget is guessed from the plain run and then corrected by
the estimates of the attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.types.estimate import Estimate

_GAPS_KEPT = 0.5
"""Share of the plain run's fragmentation that the first budget leaves room for. A full card makes
the allocator give cached segments back, so it need not be all of it."""
_FIRST_CORRECTION = 0.6
"""Share of what is missing that the second budget takes off, for the same reason."""
_MOST_TIGHTER = 3
"""Attempts that do not fit before the least peak is tried."""
_WORTH_SECONDS = 0.02
"""Added time, as a fraction of the step, below which nothing is gained by a looser budget."""
_WORTH_BYTES = 0.02
"""Spare memory, as a fraction of the planned peak, below which none is tried."""


@dataclass(frozen=True)
class Outcome:
    """What an attempt says. Bytes."""

    planned: int
    """The step's peak as the solver saw it, requested."""
    requested: int
    """The run's, as captured."""
    high: int
    """High bound of the process peak."""
    missing: int
    """How much larger the card must be; 0 when it fits."""
    spare: int
    """Card minus high bound; 0 when it does not fit."""
    added_fraction: float
    least: bool
    """Whether it was the plan of the least peak."""

    @property
    def fits(self) -> bool:
        return self.missing == 0

    @property
    def ratio(self) -> float:
        """Bytes of the process for each requested one, never below 1."""
        return max(self.high / max(self.requested, 1), 1.0)


def outcome(
    estimate: Estimate, *, planned: int, added_fraction: float, least: bool = False
) -> Outcome:
    """Raises ValueError for an estimate without a card."""
    if estimate.gpu is None or estimate.fits is None:
        raise ValueError("an estimate without a card has no outcome")
    missing = 0 if estimate.fits else max(estimate.missing_bytes or 0, 1)
    return Outcome(
        planned=planned,
        requested=estimate.requested_peak_bytes,
        high=estimate.high_bytes,
        missing=missing,
        spare=max(estimate.gpu.total_bytes - estimate.high_bytes, 0) if estimate.fits else 0,
        added_fraction=added_fraction,
        least=least,
    )


def first_budget(plain: Estimate) -> int:
    """Requested bytes of a step that the card is likely to hold.

    What the estimate adds to the reserved bytes (margin and context) is known; of the fragmentation
    a part is assumed to stay. Raises ValueError for an estimate without a card.
    """
    if plain.gpu is None:
        raise ValueError("an estimate without a card has no budget")
    reserved = max(plain.reserved_peak_bytes, 1)
    room = (plain.gpu.total_bytes - plain.gpu.context_high_bytes) * (
        reserved / max(plain.reserved_high_bytes, reserved)
    )
    gaps = max(reserved / max(plain.requested_peak_bytes, 1) - 1.0, 0.0)
    return int(room / (1.0 + _GAPS_KEPT * gaps))


def next_budget(outcomes: Sequence[Outcome]) -> int | None:
    """The budget to plan for after these attempts, in order; 0 for the least peak, None when
    another attempt would gain nothing."""
    fitting = [o for o in outcomes if o.fits]
    if fitting:
        return _looser(outcomes, fitting)
    if any(o.least for o in outcomes):
        return None
    if len(outcomes) >= _MOST_TIGHTER:
        return 0
    last = min(outcomes, key=lambda o: o.planned)
    share = _FIRST_CORRECTION if len(outcomes) == 1 else 1.0
    return max(last.planned - max(int(share * last.missing / last.ratio), 1), 0)


def _looser(outcomes: Sequence[Outcome], fitting: list[Outcome]) -> int | None:
    """Once only: after the first attempt that fits at most one more is made."""
    best = min(fitting, key=lambda o: o.added_fraction)
    if outcomes[-1] is not fitting[0] or best.added_fraction < _WORTH_SECONDS:
        return None
    ceiling = min((o.planned for o in outcomes if not o.fits), default=None)
    target = best.planned + int(best.spare / best.ratio)
    if ceiling is not None:
        target = min(target, (best.planned + ceiling) // 2) if best.spare else best.planned
    return target if target - best.planned > _WORTH_BYTES * best.planned else None
