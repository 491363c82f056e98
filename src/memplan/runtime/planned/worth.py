"""Whether planning pays: what a step loses without a plan of its own, against what planning costs.

Rent or buy (Karlin, Manasse, Rudolph, Sleator: Competitive snoopy caching, Algorithmica 1988): a
job is planned again once the steps since have lost as much as planning costs. Whatever the job does
next, no more than twice the least is spent.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from memplan.runtime.planned.account import Served
from memplan.types.run_outcome import PlanningOutcome

_REMEMBERED = 32
"""Steps whose median is the usual one."""
_FORESEEN = 0.98
"""A step with at least this share of the best hit rate is as well served as the plan can."""


class Step(NamedTuple):
    """What a step took."""

    seconds: float
    served: Served
    unused: float = 0.0
    """Reserved memory beyond the peak of what is allocated, as a share of the card; 0 where the
    card is not known."""


class Worth:
    """Adds up what steps lose that the plan does not foresee, in seconds of the card: the time that
    they take longer than those that it does, as far as it left requests unforeseen; and their time
    by the share of the card that lies unused.

    A plan that was made again is held to the best that it has reached: what it cannot mend is no
    reason for the next one.
    """

    def __init__(self, cost_seconds: float) -> None:
        """`cost_seconds`: of planning, a guess until one has been measured."""
        self.cost_seconds = cost_seconds
        self.lost_seconds = 0.0
        self._foreseen: deque[float] = deque(maxlen=_REMEMBERED)
        self._reach, self._least_unused = 1.0, 0.0
        self._again = False

    def planned(self, cost_seconds: float, *, again: bool) -> None:
        """A plan came into effect, and cost so much."""
        self.cost_seconds = cost_seconds
        self.lost_seconds = 0.0
        self._foreseen.clear()
        self._again = again
        if again:
            self._reach, self._least_unused = 0.0, 1.0

    @property
    def usual_seconds(self) -> float | None:
        """Seconds of a step that the plan predicts; None where there was none."""
        return statistics.median(self._foreseen) if self._foreseen else None

    def pays(self, step: Step) -> bool:
        """After each step: whether planning again has become worth what it costs."""
        if self._again:
            self._reach = max(self._reach, step.served.rate)
            self._least_unused = min(self._least_unused, step.unused)
        missing = self._reach - step.served.rate
        if step.served.rate >= _FORESEEN * self._reach:
            self._foreseen.append(step.seconds)
            return False
        usual = self.usual_seconds
        longer = missing * (step.seconds - usual) if usual is not None else 0.0
        lost = longer + step.seconds * (step.unused - self._least_unused)
        self.lost_seconds = max(self.lost_seconds + lost, 0.0)
        return self.lost_seconds >= self.cost_seconds


def payback(planning: float, before: float, after: float, freed: float) -> PlanningOutcome:
    """What plans cost and save. `planning`: seconds of it; `before`, `after`: seconds of a step
    without and with plans; `freed`: share of the card."""
    saved = before - after + freed * after
    return PlanningOutcome(
        seconds=round(planning, 6),
        step_seconds_before=round(before, 6),
        step_seconds=round(after, 6),
        freed_share=round(freed, 6),
        saved_seconds_per_step=round(saved, 9),
        paid_after_steps=int(-(-planning // saved)) if saved > 0 else None,
    )
