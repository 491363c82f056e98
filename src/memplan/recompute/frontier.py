"""The frontier of time against memory: the best selections for a list of budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memplan.recompute.evaluate import Evaluator
from memplan.recompute.planner import Planner
from memplan.recompute.selection import Selection
from memplan.types.deadline import SEARCH_PATIENCE, Deadline
from memplan.types.step_graph import StepGraph

POINTS = 11
EFFORT = 4
"""Annealing steps for each droppable value and start."""
SMALL_EFFORT = 1500
POINT_SECONDS = 1.2
"""The longest search for one budget: there are many, and the chain's plans are good already."""
CHOICE_BUDGETS = 16
"""Number of budgets for which `choices` searches."""
CHOICE_STEPS = 2000
"""The fewest annealing steps from one start."""
CHOICE_KEEP_SET_EFFORT = 0.05
"""CP-SAT's deterministic time for one call."""


@dataclass(frozen=True)
class Point:
    """The best selection found within a budget."""

    budget_bytes: int
    peak_bytes: int
    added_seconds: float
    """Seconds added to a step."""
    added_fraction: float
    """Added time as a fraction of the plain step's forward and backward."""
    selection: Selection


def frontier(
    graph: StepGraph,
    budgets: Sequence[int] | None = None,
    *,
    deadline_seconds: float,
) -> list[Point]:
    """A point for each budget that some selection keeps, in the order of rising budgets.

    By default the budgets are spread evenly from the lowest peak found to that of the plain step. A
    larger budget never has more added time, a smaller one never a higher peak. Raises ValueError
    for a graph that contradicts itself.
    """
    deadline = Deadline(deadline_seconds, cpu_time=True, patience=SEARCH_PATIENCE)
    planner = Planner(graph, deadline)
    effort = SMALL_EFFORT if len(planner.drops) <= 24 else EFFORT
    if budgets is None:
        planner.improve(0, deadline.part(POINTS, POINT_SECONDS), effort)
        least, plain = planner.lowest().peak, planner.plain.peak
        budgets = np.linspace(least, plain, POINTS).round().astype(int).tolist()
    wanted = sorted(set(budgets))
    for place, budget in enumerate(wanted):
        planner.improve(budget, deadline.part(len(wanted) - place, POINT_SECONDS), effort)
    return _envelope(planner, wanted)


def _envelope(planner: Planner, budgets: Sequence[int]) -> list[Point]:
    """The quickest of all candidates within each budget. All budgets choose among the same
    candidates, so a larger budget changes only to a quicker one."""
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


@dataclass(frozen=True)
class Choice:
    """A selection that no other one found beats in peak, FLOPs and cost at once."""

    selection: Selection
    flops: int
    """FLOPs that it adds."""
    cost: float
    """What it adds in the unit of the graph's `seconds`."""
    peak_bytes: int


def choices(graph: StepGraph) -> list[Choice]:
    """Selections with rising FLOPs (rising cost where FLOPs are equal) and falling peaks. The first
    drops nothing, the last has the lowest peak that was found.

    The same graph gives the same selections on every machine, because the search ends after a
    number of steps, not of seconds. Raises ValueError for a graph that contradicts itself.
    """
    planner = Planner(graph, Deadline(cpu_time=True), CHOICE_KEEP_SET_EFFORT)
    if graph.ops.flops.any():
        without = Planner(_without_flops(graph), Deadline(cpu_time=True), CHOICE_KEEP_SET_EFFORT)
        _improve(without)
        planner.add(candidate.selection for candidate in without.candidates)
    _improve(planner)
    flops = replace(graph, ops=replace(graph.ops, seconds=graph.ops.flops.astype(np.float64)))
    count = Evaluator(flops)
    every = (
        Choice(
            one.selection, int(count.evaluate(one.selection).added_seconds), one.seconds, one.peak
        )
        for one in planner.candidates
    )
    found: list[Choice] = []
    for one in sorted(every, key=lambda choice: (choice.flops, choice.cost, choice.peak_bytes)):
        if not found or one.peak_bytes < found[-1].peak_bytes:
            found.append(one)
    return found


def _improve(planner: Planner) -> None:
    effort = min(SMALL_EFFORT, max(EFFORT, CHOICE_STEPS // max(1, len(planner.drops))))
    deadline = Deadline(cpu_time=True)
    planner.improve(0, deadline, effort)
    least, plain = planner.lowest().peak, planner.plain.peak
    for budget in np.linspace(least, plain, CHOICE_BUDGETS).round().astype(int).tolist():
        planner.improve(budget, deadline, effort)


def _without_flops(graph: StepGraph) -> StepGraph:
    """The same graph, in which no op with FLOPs may run again."""
    replayable = graph.ops.replayable & (graph.ops.flops == 0)
    kept = {v for row in np.flatnonzero(~replayable).tolist() for v in graph.ops.writes_of(row)}
    droppable = graph.values.droppable.copy()
    droppable[list(kept)] = False
    return replace(
        graph,
        ops=replace(graph.ops, replayable=replayable),
        values=replace(graph.values, droppable=droppable),
    )
