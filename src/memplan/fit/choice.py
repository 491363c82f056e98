"""Which of the plans that were captured is the answer, and what stands beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from memplan import __version__
from memplan.fit.answer import NUMBERS, Alternative, Fit, Lever, Numbers
from memplan.fit.search import Found
from memplan.fit.state import State


@dataclass(frozen=True)
class Limits:
    """What a plan may do, and what is asked for beside it."""

    allow: Numbers = "exact"
    """What levers may do to the job's numbers."""
    at_most: float | None = None
    """Added time, as a fraction of the step."""
    frontier: bool = False
    host_bytes: int | None = None
    """Page-locked memory of the host that a process may use; None: no bound."""

    def allows(self, numbers: Numbers) -> bool:
        return NUMBERS.index(self.allow) >= NUMBERS.index(numbers)

    @property
    def most(self) -> float:
        return math.inf if self.at_most is None else self.at_most


NO_LIMITS = Limits()


def answer_of(
    first: State, limits: Limits, plain_seconds: float | None
) -> tuple[Fit, Found, list[Found]]:
    """The answer from what was found until now, what it rests on, and what its frontier does.

    `first`: the job without a plan. The cheapest plan that fits within the limits; where there is
    none, the cheapest that fits; else the one within the limits that needs least.
    """
    plain, search = first.captured.estimate, first.job.search
    assert plain.gpu is not None
    within = [one for one in search.found if _fraction(one, plain_seconds) <= limits.most]
    fitting = [one for one in search.found if one.fits]
    chosen = _cheapest([one for one in within if one.fits] or fitting or within)
    exact = _cheapest([one for one in search.found if one.exact])
    least = min(search.found, key=lambda one: (one.needed, one.added_seconds))
    curve = _frontier(search.found) if limits.frontier else []
    fits = chosen.fits and chosen in within
    changed = bool(chosen.levers or chosen.verdict.alloc_conf)
    answer = Fit(
        memplan_version=__version__,
        torch_version=plain.torch_version,
        gpu=plain.gpu,
        fits=fits,
        before=plain,
        after=chosen.verdict.estimate if changed else None,
        least_card_bytes=None if fits else min((one.needed for one in within), default=None),
        step_seconds=plain_seconds if changed else None,
        added_seconds=chosen.added_seconds,
        added_fraction=_fraction(chosen, plain_seconds),
        levers=_levers(chosen, plain_seconds),
        host_bytes=sum(
            part.host_bytes
            for part in (chosen.plan.state, chosen.plan.frozen, chosen.plan.offload)
            if part
        ),
        at_most=limits.at_most,
        exact=None if chosen.exact else _alternative(exact, plain_seconds),
        least=_alternative(least, plain_seconds) if search.found[1:] else None,
        frontier=[_alternative(one, plain_seconds) for one in curve],
        captures=search.captures,
        levers_tried=list(dict.fromkeys(search.tried)),
        changes=[],
        tried=[],
        attempts=list(search.attempts),
        plan=None,
        seconds=0.0,
        notes=list(chosen.notes),
    )
    return answer, chosen, curve


def _cheapest(found: Sequence[Found]) -> Found:
    """The cheapest of those that fit; if none does, the one that needs the least memory."""
    fitting = [one for one in found if one.fits]
    if fitting:
        return min(fitting, key=lambda one: (one.added_seconds, one.retries))
    return min(found, key=lambda one: one.needed)


def _frontier(found: Sequence[Found]) -> list[Found]:
    """Those that no other one beats in both added time and peak, the cheapest first."""
    curve: list[Found] = []
    for one in sorted(found, key=lambda one: (one.added_seconds, one.needed)):
        if not curve or (_peak(one) < _peak(curve[-1]) and one.needed < curve[-1].needed):
            curve.append(one)
    return curve


def _peak(one: Found) -> int:
    return one.verdict.estimate.peak_bytes


def _alternative(one: Found, plain_seconds: float | None) -> Alternative:
    estimate = one.verdict.estimate
    levers = _levers(one, plain_seconds)
    slowest = max(levers, key=lambda lever: lever.added_seconds, default=None)
    return Alternative(
        fits=one.fits,
        peak_bytes=estimate.peak_bytes,
        low_bytes=estimate.low_bytes,
        high_bytes=estimate.high_bytes,
        least_card_bytes=one.needed,
        added_seconds=one.added_seconds,
        added_fraction=_fraction(one, plain_seconds),
        bound=slowest.bound if slowest and slowest.added_seconds else "",
        levers=levers,
    )


def _levers(one: Found, plain_seconds: float | None) -> list[Lever]:
    verdict = one.verdict
    levers = [
        msgspec.structs.replace(
            lever, added_fraction=lever.added_seconds / plain_seconds if plain_seconds else 0.0
        )
        for lever in one.levers
    ]
    if verdict.alloc_conf and (verdict.saved_bytes or one.plan.recompute is None):
        conf, saved = verdict.alloc_conf, verdict.saved_bytes
        return [Lever(kind="allocator", name=conf, saved_bytes=saved, bound=""), *levers]
    return levers


def _fraction(one: Found, plain_seconds: float | None) -> float:
    return one.added_seconds / plain_seconds if plain_seconds else 0.0
