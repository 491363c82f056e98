"""The least added time within a budget of the whole step's peak, and the least peak.

docs/recompute.md, "Budgets": what is proved and what is search.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memplan.recompute.planner import Clock, Planner
from memplan.recompute.selection import Selection
from memplan.types.solution import Infeasible, Solution, Solved, TimedOut
from memplan.types.step_graph import StepGraph

EFFORT = 20
"""Annealing steps a droppable value and start, in the first round."""
SMALL_EFFORT, SMALL_STEPS = 2400, 48_000
"""On small graphs: the most of them, and annealing steps a start at most."""
ROUNDS = 5
RESTARTS = 12
"""Of annealing in a round, on small graphs."""


def solve(
    graph: StepGraph,
    budget_bytes: int,
    *,
    deadline_seconds: float,
    cancel: Callable[[], bool] | None = None,
) -> Solution[Selection]:
    """A selection that keeps the step's peak within `budget_bytes` and adds little time.

    Cost and bound are seconds that it adds to a step. Infeasible: proved by the bound on the peak;
    its witness is the least peak found, in bytes. TimedOut: nothing found although the bound does
    not forbid it, or stopped before looking; `best` is None then, and whoever wants the nearest
    selection asks `least_peak`. `cancel` is asked several
    times a second, from another thread too. Raises ValueError for a
    graph that contradicts itself.
    """
    clock = Clock(deadline_seconds, cancel)
    planner = Planner(graph, clock)
    return solve_with(planner, budget_bytes, clock)


def solve_with(planner: Planner, budget_bytes: int, clock: Clock) -> Solution[Selection]:
    """As `solve`, with candidates that are there already."""
    least = planner.bounds.least_peak
    if budget_bytes < least:
        planner.improve(0, clock, effort_for(planner), RESTARTS, ROUNDS)
        return Infeasible(
            f"no selection brings the peak below {least} bytes", float(planner.lowest().peak)
        )
    planner.improve(budget_bytes, clock, effort_for(planner), RESTARTS, ROUNDS)
    if planner.best(budget_bytes) is None and clock.left:
        planner.improve(0, clock, effort_for(planner), RESTARTS, ROUNDS)
    bound = planner.least_seconds(budget_bytes)
    best = planner.best(budget_bytes)
    if bound == math.inf:
        return Infeasible(
            f"no selection keeps the peak within {budget_bytes} bytes", float(planner.lowest().peak)
        )
    if best is None:
        return TimedOut(None, bound)
    return Solved(best.selection, best.seconds, min(bound, best.seconds))


def least_peak(
    graph: StepGraph,
    *,
    deadline_seconds: float,
    cancel: Callable[[], bool] | None = None,
) -> Solution[Selection]:
    """The selection with the lowest peak of the step that was found; of such, the quickest. Cost
    and bound are bytes. Always Solved: dropping nothing is a selection."""
    clock = Clock(deadline_seconds, cancel)
    planner = Planner(graph, clock)
    planner.improve(0, clock.part(2), effort_for(planner), RESTARTS, ROUNDS)
    planner.improve(planner.lowest().peak, clock, effort_for(planner), RESTARTS, ROUNDS)
    best = planner.lowest()
    return Solved(best.selection, float(best.peak), float(planner.bounds.least_peak))


def effort_for(planner: Planner) -> int:
    """Annealing steps a droppable value and start."""
    if not planner.small:
        return EFFORT
    return min(SMALL_EFFORT, SMALL_STEPS // max(1, len(planner.drops)))
