"""Chooses the order in which a captured step runs."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from memplan.order.allocated import allocated_peak
from memplan.order.evaluate import peak, program_order
from memplan.order.solve import solve
from memplan.order.validate import order_fault
from memplan.runtime.graph.operator_graph import OperatorGraph
from memplan.runtime.graph.report import ProgramReport
from memplan.runtime.graph.update_groups import group_updates
from memplan.types.alloc_conf import conf_in
from memplan.types.deadline import Deadline
from memplan.types.errors import InternalError
from memplan.types.trace import I64


@dataclass(frozen=True)
class Ordering:
    """An order of a program's operators, and the memory that it needs."""

    nodes: Sequence[fx.Node]
    """All nodes but placeholders and output."""
    report: ProgramReport


def choose_order(
    operators: OperatorGraph, *, search: bool, deadline_seconds: float, seed: int
) -> Ordering:
    """The order with the lowest peak that is found within the deadline, in seconds; the program's
    own order without a `search`. Raises InternalError if the order breaks a dependency."""
    began = time.perf_counter()
    graph = operators.graph
    if not search or not len(graph):
        return _ordering(operators, program_order(graph), 0, 0.0)
    importlib.import_module(
        "torch._inductor.memory"
    )  # takes seconds once, which are not the search's
    found = solve(graph, deadline=Deadline(deadline_seconds), seed=seed)
    assert found.best is not None  # at least program order
    order = found.best.order
    if fault := order_fault(graph, order.tolist(), found.best.peak_bytes):
        raise InternalError(f"the order that was found is wrong: {fault}")
    return _ordering(operators, order, int(found.bound), time.perf_counter() - began)


def _ordering(operators: OperatorGraph, order: I64, bound: int, seconds: float) -> Ordering:
    plain = program_order(operators.graph)
    program_peak = _peak(operators, plain)
    operators = group_updates(operators, order, lambda of: _peak(of, order))
    graph = operators.graph
    ordered = _peak(operators, order)
    high = peak(replace(graph, scratch=operators.scratch_high), order) - peak(graph, order)
    report = ProgramReport(
        operators=len(graph),
        plain_peak_bytes=program_peak,
        ordered_peak_bytes=ordered,
        high_peak_bytes=ordered + high,
        lower_bound_bytes=bound,
        order_seconds=seconds,
    )
    return Ordering(operators.schedule(order), report)


def _peak(operators: OperatorGraph, order: I64) -> int:
    if not operators.program.on_cuda:  # no caching allocator
        return peak(operators.graph, order)
    return allocated_peak(operators.graph, order, operators.held, conf_in(os.environ))
