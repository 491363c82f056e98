"""Finds selections with the least added time within a budget, or with the lowest peak.

See docs/recompute.md, "Budgets", for what is proved and what is found by search.
"""

from __future__ import annotations

import math

from memplan.recompute.planner import Candidate, Planner
from memplan.recompute.selection import Selection
from memplan.types.deadline import SEARCH_PATIENCE, Deadline
from memplan.types.solution import Infeasible, Solution, Solved, TimedOut
from memplan.types.step_graph import StepGraph

EFFORT = 20
"""Annealing steps in the first round for each droppable value and start."""
SMALL_EFFORT, SMALL_STEPS = 2400, 48_000
"""The same for small graphs, and the most annealing steps from one start."""
ROUNDS = 5
RESTARTS = 12
"""Restarts of annealing in a round, on small graphs."""
_HALVINGS = 6
"""How often `least_peak_within` halves the range of budgets."""


class Solver:
    """Candidates found for one budget also serve the next one of the same graph. Raises ValueError
    for a graph that contradicts itself."""

    def __init__(self) -> None:
        self._planner: Planner | None = None

    def solve(
        self, graph: StepGraph, budget_bytes: int, *, deadline_seconds: float
    ) -> Solution[Selection]:
        """A selection that keeps the step's peak within `budget_bytes` and adds little time.

        Cost and bound are seconds that it adds to a step. The result is Infeasible if the bound on
        the peak proves it; its witness is the lowest peak found, in bytes. It is TimedOut, with
        `best` None, if nothing was found although the bound allows it; `least_peak` then gives the
        nearest selection.
        """
        deadline = Deadline(deadline_seconds, cpu_time=True, patience=SEARCH_PATIENCE)
        planner = self._planner_of(graph, deadline)
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
                f"no selection keeps the peak within {budget_bytes} bytes",
                float(planner.lowest().peak),
            )
        if best is None:
            return TimedOut(None, bound)
        return Solved(best.selection, best.seconds, min(bound, best.seconds))

    def least_peak(self, graph: StepGraph, *, deadline_seconds: float) -> Solved[Selection]:
        """The selection with the lowest peak of the step that was found; of equals, the quickest.
        Cost and bound are bytes. It is always Solved, because dropping nothing is a selection,
        too."""
        deadline = Deadline(deadline_seconds, cpu_time=True, patience=SEARCH_PATIENCE)
        planner = self._planner_of(graph, deadline)
        _search(planner, 0, deadline.part(2))
        _search(planner, planner.lowest().peak, deadline)
        best = planner.lowest()
        return Solved(best.selection, float(best.peak), float(planner.bounds.least_peak))

    def _planner_of(self, graph: StepGraph, deadline: Deadline) -> Planner:
        if self._planner is None or self._planner.graph is not graph:
            self._planner = Planner(graph, deadline)
        return self._planner


def least_peak_within(
    graph: StepGraph,
    most_added_fraction: float,
    *,
    deadline_seconds: float,
) -> Solved[Selection]:
    """The selection with the lowest peak found that adds at most `most_added_fraction` to the time
    of forward and backward. Cost and bound are bytes.

    Budgets are bisected, because the least time rises as the budget falls. The result is always
    Solved, because dropping nothing adds no time. Raises ValueError for a graph that contradicts
    itself.
    """
    deadline = Deadline(deadline_seconds, cpu_time=True, patience=SEARCH_PATIENCE)
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
