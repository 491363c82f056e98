"""Which budget to plan for next, from what the captured attempts say.

A solver counts the requested bytes of a step. A card has to hold more: blocks are rounded, segments
leave gaps, the context and the margin of the estimate come on top. How much that is depends on the
very requests that a plan changes, so it is measured on each attempt as the least card on which its
estimate fits, and the next budget is in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_CAUTION_FIRST = 0.98
_CAUTION = 0.995
"""Plans make for more gaps than the plain run has; two plans differ little."""
_SPARE_USED = 0.9
"""If a larger budget would have been enough, this fraction of the difference is added: part of the
bytes is needed whatever the plan."""
_OVER = 1.003
"""A step whose peak is so much larger than its budget was planned on a wrong graph."""
_MOST_TIGHTER = 4
"""Attempts at budgets that do not fit."""
_WORTH_SECONDS = 0.02
"""Added time, as a fraction of the step, below which nothing is gained by a looser budget."""
_WORTH_BYTES = 0.02
"""How much larger a looser budget has to be, as a fraction of the peak."""


@dataclass(frozen=True)
class Card:
    """Bytes of the card and of a process's context on it at most."""

    total: int
    context: int


@dataclass(frozen=True)
class Outcome:
    """What an attempt says. Bytes."""

    budget: int
    """0 for the least peak."""
    planned: int
    """The step's peak in requested bytes, as the solver would see it now."""
    needed: int
    """The least card that it fits."""
    fits: bool
    added_fraction: float
    least: bool = False
    """Whether it was the plan of the least peak, and nothing was learnt from it."""


def first_budget(planned: int, needed: int, card: Card) -> int:
    """Requested bytes of a step that the card is likely to hold, from the plain run's peak and the
    least card that it fits."""
    return int(_CAUTION_FIRST * _in_proportion(planned, needed, card))


def room(outcome: Outcome, card: Card) -> int:
    """The same, from what an attempt says."""
    return int(_CAUTION * _in_proportion(outcome.planned, outcome.needed, card))


def next_budget(outcomes: Sequence[Outcome], card: Card) -> int | None:
    """The budget to plan for after these attempts, in order; None when another attempt would gain
    nothing."""
    asked = [o for o in outcomes if o.budget] or outcomes
    fitting = [o for o in asked if o.fits]
    if fitting:
        return _looser(asked, fitting, card)
    least = [o for o in outcomes if o.least]
    if len(asked) >= _MOST_TIGHTER or (least and not least[-1].fits):
        return None
    last = asked[-1]
    if 0 < last.budget * _OVER < last.planned:
        return last.budget  # once more, on what was learnt
    target = min(_in_proportion(last.planned, last.needed, card), last.planned)
    target = int(_CAUTION * target)
    known = max((o.planned for o in outcomes if o.fits), default=0)
    if target <= known:  # the least peak fits: what adds less lies above it
        target = (known + min(o.planned for o in asked)) // 2
        return target if target - known > _WORTH_BYTES * known else None
    return target or None


def _looser(outcomes: Sequence[Outcome], fitting: list[Outcome], card: Card) -> int | None:
    """A larger budget to try, or None. It is tried only once, after the first attempt that fits."""
    best = fitting[0]
    if outcomes[-1] is not best or best.added_fraction < _WORTH_SECONDS:
        return None
    more = _in_proportion(best.planned, best.needed, card) - best.planned
    target = best.planned + int(_SPARE_USED * more)
    ceiling = min((o.planned for o in outcomes if not o.fits), default=None)
    if ceiling is not None:
        target = min(target, (best.planned + ceiling) // 2)
    return target if target - best.planned > _WORTH_BYTES * best.planned else None


def _in_proportion(planned: int, needed: int, card: Card) -> float:
    return planned * max(card.total - card.context, 0) / max(needed - card.context, 1)
