"""Finds the order with the lowest peak: docs/order.md, "The solver"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memplan.order.baselines import Candidate, baseline_orders, best
from memplan.order.bound import Bound, cut_bound, lower_bound
from memplan.order.evaluate import peak, program_order
from memplan.order.refine import refine
from memplan.order.updates import early_updates
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.solution import Solved, TimedOut
from memplan.types.trace import I64

_BOUND_SECONDS = 1.0
"""Time for the lower bound where the search used up the deadline."""


@dataclass(frozen=True)
class Order:
    """An order of a graph's operators."""

    order: I64
    """Rows of operators."""
    peak_bytes: int
    proof: Bound
    """Why no order has a lower peak than the solution's bound."""


def solve(
    graph: Graph,
    *,
    deadline: Deadline,
    seed: int = 0,
    baselines: Callable[[], list[Candidate]] | None = None,
) -> Solved[Order] | TimedOut[Order]:
    """An order that keeps all dependencies. Its peak is never above that of program order, nor
    above those of Inductor's orders that are found before the deadline.

    Cost and bound are bytes at the peak. The result is TimedOut, with the best order and bound so
    far, if the deadline comes; otherwise the same graph and seed give the same order. `baselines`
    replaces `baseline_orders`, for callers that need them, too; it is only called where they may be
    better. Raises ValueError for a graph that contradicts itself.
    """
    graph.check()
    found = early_updates(graph, program_order(graph))
    proved = deadline.result_of(lambda: cut_bound(graph, found, deadline))
    if peak(graph, found) > proved.bytes:
        known = baselines() if baselines is not None else baseline_orders(graph, deadline)
        start = min([found, best(known).order], key=lambda order: peak(graph, order))
        found = refine(graph, start, proved.bytes, deadline, seed).order
        longer = deadline.again(max(deadline.left(), _BOUND_SECONDS))
        proved = longer.result_of(lambda: lower_bound(graph, found, longer))
    order = Order(found, peak(graph, found), proved)
    if deadline.passed and order.peak_bytes > proved.bytes:
        return TimedOut(order, proved.bytes, order.peak_bytes)
    return Solved(order, order.peak_bytes, proved.bytes)
