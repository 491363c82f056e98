"""The order of the least peak: docs/order.md, "The solver"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memplan.order.baselines import baseline_orders, best
from memplan.order.bound import Certificate, lower_bound
from memplan.order.search import Clock, improve
from memplan.types.graph import Graph
from memplan.types.solution import Solved, TimedOut
from memplan.types.trace import I64


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
    deadline_seconds: float,
    seed: int = 0,
    cancel: Callable[[], bool] | None = None,
) -> Solved[Order] | TimedOut[Order]:
    """An order that keeps to the dependencies, and never has a higher peak than program order or
    the orders of PyTorch's Inductor that were there in time.

    Cost and bound are bytes at the peak. TimedOut, with the best order and bound so far: the
    deadline came, or `cancel`, which is asked several times a second, answered true. The same graph
    and seed give the same order unless it does. Raises ValueError for a graph that contradicts
    itself.
    """
    graph.check()
    clock = Clock(deadline_seconds, cancel)
    start = best(baseline_orders(graph, clock.over))
    found = improve(graph, start.order, graph.base_bytes, clock)
    proved = lower_bound(graph, found.order, seconds=max(clock.left, 1.0), cancel=clock.stop)
    order = Order(found.order, found.peak_bytes, proved.certificate)
    if clock.over() and found.peak_bytes > proved.bytes:
        return TimedOut(order, proved.bytes, order.peak_bytes)
    return Solved(order, order.peak_bytes, proved.bytes)
