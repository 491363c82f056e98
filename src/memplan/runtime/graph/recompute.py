"""Which activations are dropped and made again, so that a graph keeps to a budget.

The solver (`memplan.recompute`) chooses on the joint graph; PyTorch's partitioner carries it out,
by the tags that `torch.utils.checkpoint` puts on nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memplan.recompute.evaluate import evaluate
from memplan.recompute.selection import Selection
from memplan.recompute.solve import least_peak, solve
from memplan.report.text import format_bytes
from memplan.runtime.graph.dependencies import Operators
from memplan.runtime.graph.passes import Pass, passes_of
from memplan.runtime.graph.program import facts_of
from memplan.types.errors import InfeasibleError
from memplan.types.solution import Solution, Solved, TimedOut

HALVINGS = 6
"""Of the range from the least peak to that without recomputation, to find what fits."""


@dataclass(frozen=True)
class Attempt:
    """A graph with some of its activations made again."""

    peak_bytes: int
    recomputed: frozenset[str]
    """Names of the joint graph's nodes that run a second time."""


def within_budget(
    plain: Operators,
    first: Attempt,
    budget_bytes: int,
    attempt: Callable[[frozenset[str]], Attempt],
    *,
    deadline_seconds: float,
) -> Attempt:
    """The attempt with as little recomputed as was found to keep its peak within the budget.

    `plain`: the graph as it is, nothing in place; `first`: what it needs in the best order.
    `attempt` says what the graph needs when nodes of these names run again. A smaller budget never
    gets a larger peak: see `_Search`. Raises InfeasibleError, with the least peak that was found,
    where none keeps to it.
    """
    search = _Search(plain, first, attempt, deadline_seconds)
    found = search.within(budget_bytes)
    if found is not None:
        return found
    lowest = search.lowest
    raise InfeasibleError(
        f"no order and recomputation found keeps the step within {format_bytes(budget_bytes)}; "
        f"the least found is {format_bytes(lowest.peak_bytes)} "
        f"(it is {format_bytes(first.peak_bytes)} without recomputation)",
        f"budget={lowest.peak_bytes}, a smaller batch or shorter sequences",
    )


def least(
    plain: Operators,
    first: Attempt,
    attempt: Callable[[frozenset[str]], Attempt],
    *,
    deadline_seconds: float,
) -> Attempt:
    """The attempt with the least peak: the smallest budget that `within_budget` keeps to."""
    search = _Search(plain, first, attempt, deadline_seconds)
    search.within(-1)
    return search.lowest


class _Search:
    """Halves the range of the solver's budgets, always at the same places.

    Two budgets are treated alike up to a place that the larger one accepts and the smaller one does
    not. What is accepted there needs more than the smaller budget; so the accepted attempt with the
    largest peak, which is taken, never needs less than what a smaller budget gets.
    """

    def __init__(
        self,
        plain: Operators,
        first: Attempt,
        attempt: Callable[[frozenset[str]], Attempt],
        deadline_seconds: float,
    ) -> None:
        self._planner = _Planner(plain, deadline_seconds / (HALVINGS + 1))
        self._first = first
        self._attempt = attempt
        self._tried = {first.recomputed: first}

    @property
    def lowest(self) -> Attempt:
        """Of those that were tried."""
        return min(self._tried.values(), key=lambda one: one.peak_bytes)

    def within(self, budget_bytes: int) -> Attempt | None:
        """None where nothing keeps to the budget."""
        if self._first.peak_bytes <= budget_bytes:
            return self._first
        accepted: list[Attempt] = []
        below, above = 0, 1 << HALVINGS
        least, most = self._planner.least_bytes, self._planner.peak_bytes
        while above - below > 1:
            middle = (below + above) // 2
            made = self._made(least + (most - least) * middle // (1 << HALVINGS))
            if made.peak_bytes <= budget_bytes:
                accepted.append(made)
                below = middle
            else:
                above = middle
        if not accepted:
            made = self._made(0)
            return made if made.peak_bytes <= budget_bytes else None
        return max(accepted, key=lambda one: one.peak_bytes)

    def _made(self, budget_bytes: int) -> Attempt:
        names = self._planner.plan(budget_bytes)
        if names not in self._tried:
            self._tried[names] = self._attempt(names)
        return self._tried[names]


def tag(graph: fx.Graph, names: frozenset[str]) -> None:
    """Have PyTorch's partitioner run these nodes again in the backward pass."""
    for node in graph.nodes:
        if node.name in names:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)


class _Planner:
    """What to make again in each pass, for one budget after another."""

    def __init__(self, plain: Operators, seconds: float) -> None:
        self._plain = plain
        self._passes = passes_of(plain)
        self._seconds = seconds / max(1, len(self._passes))
        self._known: dict[Pass, Selection] = {}
        peaks = [evaluate(one.graph, Selection()).peak_bytes for one in self._passes]
        self.peak_bytes = max(peaks, default=0)
        least = [evaluate(one.graph, self._least(one)).peak_bytes for one in self._passes]
        self.least_bytes = max(least, default=0)

    def plan(self, budget_bytes: int) -> frozenset[str]:
        """Names of nodes. A budget of 0 asks for the least peak."""
        return frozenset(
            name for one in self._passes for name in self._names(one, self._of(one, budget_bytes))
        )

    def _of(self, one: Pass, budget_bytes: int) -> Selection:
        if budget_bytes > 0:
            found = _selection(solve(one.graph, budget_bytes, deadline_seconds=self._seconds))
            if found is not None:
                return found
        return self._least(one)

    def _least(self, one: Pass) -> Selection:
        if one not in self._known:
            found = least_peak(one.graph, deadline_seconds=self._seconds)
            self._known[one] = _selection(found) or Selection()
        return self._known[one]

    def _names(self, one: Pass, selection: Selection) -> Iterator[str]:
        """Of what makes the dropped storages out of those that are kept, and of their views."""
        dropped = {one.storages[value] for group in selection.groups for value in group}
        kept = self._kept(one, dropped, selection)
        again: set[int] = set()
        nodes = self._plain.program.graph_module.graph.nodes
        for node in reversed(list(nodes)):
            if node.op != "call_function" or facts_of(node).backward:
                continue
            facts = facts_of(node)
            if not facts.free and {*facts.makes} & (dropped | again):
                again |= {*facts.makes, *facts.reads} - kept
        for node in nodes:
            if node.op == "call_function" and not facts_of(node).backward:
                facts = facts_of(node)
                shown = {*facts.makes} if facts.shows is None else {facts.shows}
                if shown & again:
                    yield node.name

    def _kept(self, one: Pass, dropped: set[int], selection: Selection) -> set[int]:
        """Storages that are there in backward, or before the pass."""
        values, forward = one.graph.values, one.graph.forward_ops
        held = {one.storages[value] for value in selection.held}
        return held | {
            storage
            for storage, alloc, free in zip(one.storages, values.alloc, values.free, strict=True)
            if storage not in dropped and (alloc < 0 or free > forward)
        }


def _selection(found: Solution[Selection]) -> Selection | None:
    if isinstance(found, Solved):
        return found.solution
    return found.best if isinstance(found, TimedOut) else None
