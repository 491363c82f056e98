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

ATTEMPTS = 4
"""Budgets for recomputation alone that are tried: the order needs less than it expects."""


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
    `attempt` says what the graph needs when nodes of these names run again. Raises InfeasibleError,
    with the least peak that was found, where none keeps to it.
    """
    planner = _Planner(plain, deadline_seconds / ATTEMPTS)
    lowest = first
    target = budget_bytes + max(0, planner.peak_bytes - first.peak_bytes)
    for number in range(ATTEMPTS):
        made = attempt(planner.plan(target))
        if made.peak_bytes <= budget_bytes:
            return made
        lowest = min(lowest, made, key=lambda one: one.peak_bytes)
        if target <= 0:
            break
        target = max(0, target - max(1, made.peak_bytes - budget_bytes))
        if number == ATTEMPTS - 2:
            target = 0  # the least that there is
    raise InfeasibleError(
        f"no order and recomputation found keeps the step within {format_bytes(budget_bytes)}; "
        f"the least found is {format_bytes(lowest.peak_bytes)} "
        f"(it is {format_bytes(first.peak_bytes)} without recomputation)",
        f"budget={lowest.peak_bytes}, a smaller batch or shorter sequences",
    )


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
        peaks = [evaluate(one.graph, Selection()).peak_bytes for one in self._passes]
        self.peak_bytes = max(peaks, default=0)

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
        return _selection(least_peak(one.graph, deadline_seconds=self._seconds)) or Selection()

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
