"""The order of the least peak: docs/order.md, "The solver"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memplan.order.baselines import Candidate, baseline_orders, best
from memplan.order.bound import Certificate, cut_bound, lower_bound
from memplan.order.evaluate import peak, program_order
from memplan.order.refine import refine
from memplan.order.updates import early_updates
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.solution import Solved, TimedOut
from memplan.types.trace import I64

_BOUND_SECONDS = 1.0
"""For the bound where the search took all the time."""


@dataclass(frozen=True)
class Order:
    """An order of a graph's operators, and what proves how good it is."""

    order: I64
    """Rows of operators."""
    peak_bytes: int
    certificate: Certificate
    """Of the bound that comes with the solution: `check_bound` reads it."""


def solve(
    graph: Graph,
    *,
    deadline: Deadline,
    seed: int = 0,
    baselines: Callable[[], list[Candidate]] | None = None,
) -> Solved[Order] | TimedOut[Order]:
    """An order that keeps to the dependencies, and never has a higher peak than program order or
    the orders of PyTorch's Inductor that were there in time.

    Cost and bound are bytes at the peak. TimedOut, with the best order and bound so far: the
    deadline came. The same graph and seed give the same order unless it does. `baselines` gives
    the graph's `baseline_orders` to who needs them, too; it is not asked where they cannot be
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
    order = Order(found, peak(graph, found), proved.certificate)
    if deadline.passed and order.peak_bytes > proved.bytes:
        return TimedOut(order, proved.bytes, order.peak_bytes)
    return Solved(order, order.peak_bytes, proved.bytes)
