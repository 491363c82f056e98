"""A captured step within a budget: what is recomputed, and the order of it all."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.recompute.selection import Selection
from memplan.recompute.solve import least_peak, solve
from memplan.report.text import format_bytes
from memplan.runtime.compiled.dependencies import Operators, operators
from memplan.runtime.compiled.duplicate import with_recomputation
from memplan.runtime.compiled.ordering import Ordering, choose_order
from memplan.runtime.compiled.passes import Pass, passes_of
from memplan.runtime.compiled.program import StepProgram
from memplan.types.errors import InfeasibleError
from memplan.types.solution import Solution, Solved, TimedOut

ATTEMPTS = 4
"""Budgets for recomputation alone that are tried: the order needs less than it expects."""


@dataclass(frozen=True)
class Within:
    """A program that keeps to a budget."""

    program: StepProgram
    ordering: Ordering
    recomputed: int
    """Operators that run a second time."""


def within_budget(
    program: StepProgram,
    budget_bytes: int,
    *,
    search: bool,
    deadline_seconds: float,
    seed: int,
) -> Within:
    """The program with as little recomputed as was found to keep its peak within the budget.

    Raises InfeasibleError, with the least peak that was found, where none does. Takes a few times
    `deadline_seconds`.
    """
    plain = operators(program)
    each = deadline_seconds / ATTEMPTS

    def ordered(these: Operators) -> Ordering:
        return choose_order(these, search=search, deadline_seconds=each, seed=seed)

    first = ordered(plain)
    if first.ordered_peak_bytes <= budget_bytes:
        return Within(program, first, 0)
    planner = _Planner(plain, each)
    lowest = Within(program, first, 0)
    target, best = budget_bytes, None
    gained = first.program_peak_bytes - first.ordered_peak_bytes
    for attempt in range(ATTEMPTS):
        found = planner.plan(target + gained if attempt == 0 else target)
        again, count = with_recomputation(plain, found)
        ordering = ordered(operators(again))
        made = Within(again, ordering, count)
        if ordering.ordered_peak_bytes <= budget_bytes:
            best = made
            break
        if ordering.ordered_peak_bytes < lowest.ordering.ordered_peak_bytes:
            lowest = made
        if target <= 0:
            break
        target = budget_bytes - attempt * (ordering.ordered_peak_bytes - budget_bytes)
        if attempt == ATTEMPTS - 2:
            target = 0  # the least that there is
    if best is not None:
        return best
    least = lowest.ordering.ordered_peak_bytes
    raise InfeasibleError(
        f"no order and recomputation found keeps the step within {format_bytes(budget_bytes)}; "
        f"the least found is {format_bytes(least)} "
        f"(it is {format_bytes(first.program_peak_bytes)} without any)",
        f"budget={least}, a smaller batch or shorter sequences",
    )


class _Planner:
    """What to recompute in each pass, for one budget after another."""

    def __init__(self, plain: Operators, seconds: float) -> None:
        self._passes = passes_of(plain)
        self._seconds = seconds / max(1, len(self._passes))

    def plan(self, budget_bytes: int) -> list[tuple[Pass, Selection]]:
        """A budget of 0 asks for the least peak."""
        return [(one, self._of(one, budget_bytes)) for one in self._passes]

    def _of(self, one: Pass, budget_bytes: int) -> Selection:
        if budget_bytes > 0:
            found = _selection(solve(one.graph, budget_bytes, deadline_seconds=self._seconds))
            if found is not None:
                return found
        return _selection(least_peak(one.graph, deadline_seconds=self._seconds)) or Selection()


def _selection(found: Solution[Selection]) -> Selection | None:
    if isinstance(found, Solved):
        return found.solution
    return found.best if isinstance(found, TimedOut) else None
