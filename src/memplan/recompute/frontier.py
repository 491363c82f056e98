"""Time against memory: the best selections for a row of budgets, as a monotone envelope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.recompute.planner import Clock, Planner
from memplan.recompute.selection import Selection
from memplan.types.step_graph import StepGraph

POINTS = 11
EFFORT = 4
"""Annealing steps a droppable value and start."""
SMALL_EFFORT = 1500
POINT_SECONDS = 1.2
"""Of search for one budget at most: the chain's plans are good, and there are many budgets."""


@dataclass(frozen=True)
class Point:
    """The best selection found within a budget."""

    budget_bytes: int
    peak_bytes: int
    added_seconds: float
    """In a step."""
    added_fraction: float
    """Of the plain step's time in forward and backward."""
    selection: Selection


def frontier(
    graph: StepGraph,
    budgets: Sequence[int] | None = None,
    *,
    deadline_seconds: float,
    cancel: Callable[[], bool] | None = None,
) -> list[Point]:
    """A point for each budget that something was found for, in rising order of budgets.

    By default the budgets are spread evenly from the least peak found to the plain one. A larger
    budget never has more added time, a smaller one never a higher peak. Raises ValueError for a
    graph that contradicts itself.
    """
    clock = Clock(deadline_seconds, cancel)
    planner = Planner(graph, clock)
    effort = SMALL_EFFORT if len(planner.drops) <= 24 else EFFORT
    if budgets is None:
        planner.improve(0, clock.part(POINTS, POINT_SECONDS), effort)
        least, plain = planner.lowest().peak, planner.plain.peak
        budgets = np.linspace(least, plain, POINTS).round().astype(int).tolist()
    wanted = sorted(set(budgets))
    for place, budget in enumerate(wanted):
        planner.improve(budget, clock.part(len(wanted) - place, POINT_SECONDS), effort)
    return _envelope(planner, wanted)


def _envelope(planner: Planner, budgets: Sequence[int]) -> list[Point]:
    """Of all candidates the quickest within each budget. They are the same candidates for every
    budget and the quickest of them only changes to a quicker and larger one."""
    points = []
    for budget in budgets:
        best = planner.best(budget)
        if best is not None:
            points.append(
                Point(
                    budget,
                    best.peak,
                    best.seconds,
                    best.evaluation.added_fraction,
                    best.selection,
                )
            )
    return points
