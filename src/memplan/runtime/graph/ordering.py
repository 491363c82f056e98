"""Which order a captured step is run in."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from memplan.order.evaluate import peak, program_order
from memplan.order.solve import solve
from memplan.order.validate import order_fault
from memplan.runtime.graph.dependencies import Operators
from memplan.types.deadline import Deadline
from memplan.types.errors import InternalError
from memplan.types.solution import Solved, TimedOut


@dataclass(frozen=True)
class Ordering:
    """An order of a program's operators, and what it needs. Bytes are those of storages."""

    nodes: Sequence[fx.Node]
    operators: int
    program_peak_bytes: int
    """Of the order in which the step was written, each storage freed at its last use."""
    ordered_peak_bytes: int
    lower_bound_bytes: int
    """No order needs less; 0 where none was looked for."""
    seconds: float
    """Of the search."""

    @property
    def optimal(self) -> bool:
        return self.ordered_peak_bytes <= self.lower_bound_bytes


def choose_order(
    operators: Operators, *, search: bool, deadline_seconds: float, seed: int
) -> Ordering:
    """The order with the least peak that is found within the deadline. `search`: False leaves the
    program's own order."""
    began = time.perf_counter()
    graph = operators.graph
    plain = program_order(graph)
    plain_peak = peak(graph, plain)
    if not search or not len(graph):
        return Ordering(operators.schedule(plain), len(graph), plain_peak, plain_peak, 0, 0.0)
    importlib.import_module("torch._inductor.memory")  # seconds, once: not the search's
    found = solve(graph, deadline=Deadline(deadline_seconds), seed=seed)
    best = found.solution if isinstance(found, Solved) else found.best
    bound = int(found.bound) if isinstance(found, (Solved, TimedOut)) else 0
    order, least = (plain, plain_peak) if best is None else (best.order, best.peak_bytes)
    if fault := order_fault(graph, np.asarray(order).tolist(), least):
        raise InternalError(f"the order that was found is wrong: {fault}")
    seconds = time.perf_counter() - began
    return Ordering(operators.schedule(order), len(graph), plain_peak, least, bound, seconds)
