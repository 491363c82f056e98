"""Chooses which activations are dropped and recomputed, so that a graph keeps within a budget.

For each graph the solver (`memplan.recompute`) proposes a list of choices, each with more work than
the one before. The list does not depend on the budget, which only selects one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from memplan.recompute.frontier import Choice, choices
from memplan.report.text import format_bytes
from memplan.runtime.graph.compile import Budget
from memplan.runtime.graph.recompute_problem import RecomputeProblem
from memplan.runtime.graph.rematerialize import NodeReplay
from memplan.types.errors import InfeasibleError


class Attempt(Protocol):
    """A graph with some activations recomputed, in its order."""

    @property
    def peak_bytes(self) -> int: ...


T = TypeVar("T", bound=Attempt)


def within_budget(
    plain: Callable[[], RecomputeProblem],
    attempt: Callable[[tuple[NodeReplay, ...]], T],
    budget: Budget,
) -> T:
    """The result of `attempt` with little recomputation whose peak is within the budget.

    `attempt` builds the graph with given replays; `plain` builds the problem for the solver. The
    same graph and budget give the same answer. A smaller budget never has the higher peak, and a
    larger one never more FLOPs: see `Search`. Raises InfeasibleError, with the lowest peak that was
    found, where none is within the budget.
    """
    if budget is None:
        return attempt(())
    search = Search(plain, attempt)
    if isinstance(budget, str):
        search.within(-1)
        return search.lowest()
    found = search.within(budget)
    if found is not None:
        return found
    lowest = search.lowest()
    raise InfeasibleError(
        f"no order and recomputation found keeps within {format_bytes(budget)}; "
        f"the least found is {format_bytes(lowest.peak_bytes)}, "
        f"{format_bytes(lowest.peak_bytes - budget)} more "
        f"(it is {format_bytes(search.attempt(0).peak_bytes)} without recomputation)",
        f"budget={lowest.peak_bytes}, a smaller batch or shorter sequences",
    )


class Search(Generic[T]):
    """A binary search in the list of choices.

    Of the choices that it accepts, the one with the highest peak is taken. This is why budgets
    never invert: the searches for two budgets are the same up to a choice that the larger budget
    accepts and the smaller one rejects. Then the larger budget's search only accepts that choice
    and ones with less work, and the smaller budget's search only ones with more work. That choice's
    peak is above the smaller budget, so the larger budget's answer has the higher peak.
    """

    def __init__(
        self, plain: Callable[[], RecomputeProblem], attempt: Callable[[tuple[NodeReplay, ...]], T]
    ) -> None:
        self._plain = plain
        self._attempt = attempt
        self.attempts: dict[int, T] = {}
        """Results of `attempt`, by the number of their choice."""

    @cached_property
    def _problem(self) -> RecomputeProblem:
        return self._plain()

    @cached_property
    def choices(self) -> list[Choice]:
        """The solver's choices, in the order of their work."""
        return choices(self._problem.graph)

    def attempt(self, number: int) -> T:
        """The graph with the choice of this number; with 0 nothing is recomputed."""
        if number not in self.attempts:
            again = self._problem.replays(self.choices[number].selection) if number else ()
            self.attempts[number] = self._attempt(again)
        return self.attempts[number]

    def lowest(self) -> T:
        """The attempt so far with the lowest peak; among equal ones that with the least work."""
        return self.attempts[
            min(self.attempts, key=lambda number: (self.attempts[number].peak_bytes, number))
        ]

    def within(self, budget_bytes: int) -> T | None:
        """The attempt for a budget; None where no attempt is within it."""
        if self.attempt(0).peak_bytes <= budget_bytes:
            return self.attempt(0)
        accepted: list[int] = []
        below, above = 0, len(self.choices)
        while above - below > 1:
            middle = (below + above) // 2
            if self.attempt(middle).peak_bytes <= budget_bytes:
                accepted.append(middle)
                above = middle
            else:
                below = middle
        most = max(accepted, key=lambda n: (self.attempt(n).peak_bytes, -n), default=None)
        return None if most is None else self.attempt(most)
