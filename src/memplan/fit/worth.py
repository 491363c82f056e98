"""What a plan costs and saves in money: this card with it, against others that need none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from memplan.fit.answer import Fit, Priced, link_seconds
from memplan.types.estimate import Estimate

_SECONDS_PER_HOUR = 3600.0


class Other(NamedTuple):
    """Another card, and the job as captured for it without a plan."""

    gpu: str
    per_hour: float
    estimate: Estimate | None
    """None where it could not be captured for that card."""


def priced(answer: Fit, gpu: str, per_hour: float, others: Sequence[Other]) -> list[Priced]:
    """Rows for `Fit.priced`. Finding the plan counts as if the card were rented meanwhile."""
    ends = answer.after or answer.before
    step = None if ends.step_seconds is None else ends.step_seconds + link_seconds(answer)
    fits = bool(ends.fits)  # whatever time the plan may add
    ours = _priced(gpu, per_hour, fits, answer.after is not None, step)
    rows = [ours]
    planning = answer.seconds * per_hour / _SECONDS_PER_HOUR
    for other in others:
        found = other.estimate
        fits, alone = (False, None) if found is None else (bool(found.fits), found.step_seconds)
        row = _priced(other.gpu, other.per_hour, fits, False, alone)
        after = None
        if ours.plan and ours.step_cost is not None and row.step_cost is not None:
            saved = row.step_cost - ours.step_cost
            after = math.ceil(planning / saved) if saved > 0 else None
        rows.append(msgspec.structs.replace(row, paid_after_steps=after))
    return rows


def _priced(gpu: str, per_hour: float, fits: bool, plan: bool, step: float | None) -> Priced:
    return Priced(
        gpu=gpu,
        per_hour=per_hour,
        fits=fits,
        plan=plan,
        step_seconds=step,
        step_cost=per_hour * step / _SECONDS_PER_HOUR if fits and step is not None else None,
    )
