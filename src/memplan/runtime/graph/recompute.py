"""Which activations are dropped and made again, so that a graph keeps to a budget.

The solver (`memplan.recompute`) proposes one row of choices for a graph, whatever the budget; each
more work than the one before it. A budget only looks one up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from memplan.recompute.frontier import Choice, choices
from memplan.report.text import format_bytes
from memplan.runtime.graph.again import Again
from memplan.runtime.graph.compile import Budget
from memplan.runtime.graph.passes import Pass
from memplan.types.errors import InfeasibleError


class Attempt(Protocol):
    """A graph with some of its activations made again, in its order."""

    @property
    def peak_bytes(self) -> int: ...


T = TypeVar("T", bound=Attempt)


def within_budget(
    plain: Callable[[], Pass], attempt: Callable[[tuple[Again, ...]], T], budget: Budget
) -> T:
    """The attempt with little work that keeps its peak within the budget: what `attempt` makes of
    the graph when it runs these operators again.

    `plain`: the graph that runs nothing again. The same graph and budget give the same answer. A
    smaller budget never gets the higher peak, nor a larger one more FLOPs: see `Search`. Raises
    InfeasibleError, with the least peak that was found, where none keeps to it.
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
    """Halves the row of choices, always at the same places.

    Two budgets are treated alike up to a choice that the larger one accepts and the smaller one
    does not. All that the larger one accepts from there on is that choice or less work; all that
    the smaller one accepts there is more work. And that choice needs more bytes than the smaller
    budget: so does the accepted one that needs most, which is taken.
    """

    def __init__(
        self, plain: Callable[[], Pass], attempt: Callable[[tuple[Again, ...]], T]
    ) -> None:
        self._plain = plain
        self._attempt = attempt
        self.made: dict[int, T] = {}
        """Attempts, by the number of their choice."""

    @cached_property
    def _pass(self) -> Pass:
        return self._plain()

    @cached_property
    def choices(self) -> list[Choice]:
        """Of rising work."""
        return choices(self._pass.graph)

    def attempt(self, number: int) -> T:
        """Of the choice of this number; 0 is that nothing runs again."""
        if number not in self.made:
            again = self._pass.replays(self.choices[number].selection) if number else ()
            self.made[number] = self._attempt(again)
        return self.made[number]

    def lowest(self) -> T:
        """Of those that were made; of equals, the least work."""
        return self.made[min(self.made, key=lambda number: (self.made[number].peak_bytes, number))]

    def within(self, budget_bytes: int) -> T | None:
        """None where nothing keeps to the budget."""
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
