"""The least peak that costs no more than a share of the step's time."""

from __future__ import annotations

from collections.abc import Callable

from memplan.recompute.cut import least_peak_chain
from memplan.recompute.planner import Candidate, Clock, Planner
from memplan.recompute.selection import Selection
from memplan.recompute.solve import RESTARTS, ROUNDS, effort_for
from memplan.types.solution import Solved
from memplan.types.step_graph import StepGraph

_ROUNDS = 6


def least_peak_within(
    graph: StepGraph,
    most_added_fraction: float,
    *,
    deadline_seconds: float,
    cancel: Callable[[], bool] | None = None,
) -> Solved[Selection]:
    """The selection with the lowest peak found that adds at most `most_added_fraction` to the time
    of forward and backward. Cost and bound are bytes.

    Begins with the chain's least peak (`cut.least_peak_chain`), then bisects budgets: the least
    time within one rises as the budget falls. Always Solved, for
    dropping nothing adds nothing. Raises ValueError for a graph that contradicts itself.
    """
    clock = Clock(deadline_seconds, cancel)
    planner = Planner(graph, clock)
    planner.add([least_peak_chain(graph)])
    rounds = _ROUNDS + 1
    planner.improve(0, _share(clock, rounds), effort_for(planner), RESTARTS, ROUNDS)
    low = planner.lowest().peak
    for round_ in range(_ROUNDS):
        best = _lowest(planner, most_added_fraction)
        if best.peak <= low or not clock.left:
            break
        middle = (low + best.peak) // 2
        planner.improve(
            middle, _share(clock, rounds - 1 - round_), effort_for(planner), RESTARTS, ROUNDS
        )
        if _lowest(planner, most_added_fraction).peak > middle:
            low = middle + 1
    best = _lowest(planner, most_added_fraction)
    return Solved(best.selection, float(best.peak), float(planner.bounds.least_peak))


def _share(clock: Clock, parts: int) -> Clock:
    return Clock(clock.left / parts, lambda: clock.left == 0)


def _lowest(planner: Planner, most_added_fraction: float) -> Candidate:
    return min(
        (
            candidate
            for candidate in planner.candidates
            if candidate.evaluation.added_fraction <= most_added_fraction
        ),
        key=lambda candidate: (candidate.peak, candidate.seconds),
    )
