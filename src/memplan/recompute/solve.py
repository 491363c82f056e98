"""The least added time within a budget of the whole step's peak, and the least peak.

docs/recompute.md, "Budgets": what is proved and what is search.
"""

from __future__ import annotations

import math

from memplan.recompute.planner import Candidate, Planner
from memplan.recompute.selection import Selection
from memplan.types.deadline import Deadline
from memplan.types.solution import Infeasible, Solution, Solved, TimedOut
from memplan.types.step_graph import StepGraph

EFFORT = 20
"""Annealing steps a droppable value and start, in the first round."""
SMALL_EFFORT, SMALL_STEPS = 2400, 48_000
"""On small graphs: the most of them, and annealing steps a start at most."""
ROUNDS = 5
RESTARTS = 12
"""Of annealing in a round, on small graphs."""
_HALVINGS = 6
"""Of the range of budgets in which `least_peak_within` looks for the least."""


class Solver:
    """`solve` and `least_peak` for one question after the other: what was found for one serves the
    next one about the same graph."""

    def __init__(self) -> None:
        self._planner: Planner | None = None

    def solve(
        self, graph: StepGraph, budget_bytes: int, *, deadline_seconds: float
    ) -> Solution[Selection]:
        deadline = Deadline(deadline_seconds, cpu_time=True)
        return _solve(self._planner_of(graph, deadline), budget_bytes, deadline)

    def least_peak(self, graph: StepGraph, *, deadline_seconds: float) -> Solved[Selection]:
        deadline = Deadline(deadline_seconds, cpu_time=True)
        return _least_peak(self._planner_of(graph, deadline), deadline)

    def _planner_of(self, graph: StepGraph, deadline: Deadline) -> Planner:
        if self._planner is None or self._planner.graph is not graph:
            self._planner = Planner(graph, deadline)
        return self._planner


def solve(
    graph: StepGraph,
    budget_bytes: int,
    *,
    deadline_seconds: float,
) -> Solution[Selection]:
    """A selection that keeps the step's peak within `budget_bytes` and adds little time.

    Cost and bound are seconds that it adds to a step. Infeasible: proved by the bound on the peak;
    its witness is the least peak found, in bytes. TimedOut: nothing found although the bound does
    not forbid it; `best` is None then, and whoever wants the nearest selection asks `least_peak`.
    Raises ValueError for a graph that contradicts itself.
    """
    return Solver().solve(graph, budget_bytes, deadline_seconds=deadline_seconds)


def _solve(planner: Planner, budget_bytes: int, deadline: Deadline) -> Solution[Selection]:
    least = planner.bounds.least_peak
    if budget_bytes < least:
        _search(planner, 0, deadline)
        return Infeasible(
            f"no selection brings the peak below {least} bytes", float(planner.lowest().peak)
        )
    _search(planner, budget_bytes, deadline)
    if planner.best(budget_bytes) is None and not deadline.passed:
        _search(planner, 0, deadline)
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
) -> Solved[Selection]:
    """The selection with the lowest peak of the step that was found; of such, the quickest. Cost
    and bound are bytes. Always Solved: dropping nothing is a selection."""
    return Solver().least_peak(graph, deadline_seconds=deadline_seconds)


def _least_peak(planner: Planner, deadline: Deadline) -> Solved[Selection]:
    _search(planner, 0, deadline.part(2))
    _search(planner, planner.lowest().peak, deadline)
    best = planner.lowest()
    return Solved(best.selection, float(best.peak), float(planner.bounds.least_peak))


def least_peak_within(
    graph: StepGraph,
    most_added_fraction: float,
    *,
    deadline_seconds: float,
) -> Solved[Selection]:
    """The selection with the lowest peak found that adds at most `most_added_fraction` to the time
    of forward and backward. Cost and bound are bytes.

    Bisects budgets: the least time within one rises as the budget falls. Always Solved, for
    dropping nothing adds nothing. Raises ValueError for a graph that contradicts itself.
    """
    deadline = Deadline(deadline_seconds, cpu_time=True)
    planner = Planner(graph, deadline)
    _search(planner, 0, deadline.part(_HALVINGS + 1))
    low = planner.lowest().peak
    for round_ in range(_HALVINGS):
        best = _lowest(planner, most_added_fraction)
        if best.peak <= low or deadline.passed:
            break
        middle = (low + best.peak) // 2
        _search(planner, middle, deadline.part(_HALVINGS - round_))
        if _lowest(planner, most_added_fraction).peak > middle:
            low = middle + 1
    best = _lowest(planner, most_added_fraction)
    return Solved(best.selection, float(best.peak), float(planner.bounds.least_peak))


def _lowest(planner: Planner, most_added_fraction: float) -> Candidate:
    within = (c for c in planner.candidates if c.evaluation.added_fraction <= most_added_fraction)
    return min(within, key=lambda c: (c.peak, c.seconds))


def _search(planner: Planner, budget_bytes: int, deadline: Deadline) -> None:
    effort = EFFORT
    if planner.small:
        effort = min(SMALL_EFFORT, SMALL_STEPS // max(1, len(planner.drops)))
    planner.improve(budget_bytes, deadline, effort, RESTARTS, ROUNDS)
