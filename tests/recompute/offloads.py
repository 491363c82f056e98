"""What the offload search is compared with, and one call of it."""

from __future__ import annotations

from memplan.recompute.offload import WINDOWS, Link, OffloadSearch
from memplan.recompute.offload import _median as median
from memplan.recompute.selection import Selection
from memplan.recompute.transfers import Judged, OffloadPlan, Saves, Schedule
from memplan.types.deadline import Deadline
from memplan.types.solution import Solution, Solved, TimedOut
from memplan.types.step_graph import StepGraph


def solve(
    graph: StepGraph, budget_bytes: int, link: Link, *, deadline_seconds: float
) -> Solution[OffloadPlan]:
    """A plan that keeps the step's peak within the budget and adds little time.

    Cost and bound are seconds that it adds to a step. The result is TimedOut if no plan was found.
    """
    search = OffloadSearch(graph, link, Deadline(deadline_seconds, cpu_time=True))
    best = search.within(budget_bytes)
    bound = search.planner.bounds.least_seconds(budget_bytes, link.bytes_per_second)
    if best is None:
        return TimedOut(None, bound)
    return Solved(best.plan, best.added_seconds, min(bound, best.added_seconds))


def evaluate_offload(graph: StepGraph, plan: OffloadPlan, bytes_per_second: float) -> Judged:
    """Evaluate one plan."""
    saves = Saves(graph, bytes_per_second)
    schedule = Schedule(saves, plan.selection)
    return schedule.judge(plan.offloaded, plan.out_bytes, plan.ahead_bytes)


def in_order(graph: StepGraph, budget_bytes: int, link: Link) -> Judged | None:
    """The baseline: offload the first values that autograd saves, as few as the budget needs, with
    the window of `offload.WINDOWS` that adds the least time. None if all values are not enough."""
    saves = Saves(graph, link.bytes_per_second)
    schedule = Schedule(saves, Selection())
    unit = median(graph.values.bytes[saves.values])
    found = []
    for out, ahead in WINDOWS:
        low, high = 0, len(saves.values) + 1
        while high - low > 1:
            middle = (low + high) // 2
            chosen = frozenset(saves.values[:middle])
            judged = schedule.judge(chosen, out * unit, ahead * unit)
            if judged.peak_bytes <= budget_bytes:
                high = middle
                found.append(judged)
            else:
                low = middle
    return min(
        found, key=lambda one: (one.added_seconds, one.host_bytes, one.peak_bytes), default=None
    )
