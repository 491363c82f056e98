"""What is left of an order's gain once its values have addresses."""

from __future__ import annotations

import numpy as np

from memplan.cli.order import LaidOut, OrderLayouts
from memplan.layout.problem import Problem, make_problem
from memplan.layout.solve import minimise
from memplan.order.evaluate import lifetimes, program_order
from memplan.simulate.rounding import MIN_BLOCK
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.trace import I64

WITHIN = 0.001
"""So small a part above the most bytes alive at once, a layout is low enough."""


def lay_out(graph: Graph, order: I64, *, deadline: Deadline) -> OrderLayouts:
    """Layouts of both orders: one within half of the time, the other within what is left."""
    program = _laid(graph, program_order(graph), deadline.part(2))
    ordered = _laid(graph, order, deadline)
    saved = _below(ordered.height_bytes, program.height_bytes)
    return OrderLayouts(program=program, ordered=ordered, order_and_layout_saved=saved)


def _laid(graph: Graph, order: I64, deadline: Deadline) -> LaidOut:
    problem, always = _problem(graph, order)
    layout = minimise(problem, deadline=deadline, within=WITHIN).best
    assert layout is not None  # no address is fixed, and the first is made whatever the time
    height = always + layout.height
    load = always + problem.max_load
    return LaidOut(height_bytes=height, max_load_bytes=load, fragmentation=_below(load, height))


def _below(less: int, nbytes: int) -> float:
    """The fraction by which one peak is below another."""
    return round(1 - less / nbytes, 6) if nbytes else 0.0


def _problem(graph: Graph, order: I64) -> tuple[Problem, int]:
    """The values that come or go in the step, an operator's scratch among them; and the bytes of
    the rest, which lie below."""
    start, stop = lifetimes(graph, order)
    moving = (stop > start) & (graph.bytes > 0) & ((start > 0) | (stop < len(graph)))
    still = (stop > start) & ~moving
    scratch = np.flatnonzero(graph.scratch[order])
    lower = np.concatenate((start[moving], scratch))
    upper = np.concatenate((stop[moving], scratch + 1))
    size = _blocks(np.concatenate((graph.bytes[moving], graph.scratch[order][scratch])))
    base = -(-graph.base_bytes // MIN_BLOCK) * MIN_BLOCK
    return make_problem(lower, upper, size), base + int(_blocks(graph.bytes[still]).sum())


def _blocks(nbytes: I64) -> I64:
    return np.asarray(-(-nbytes // MIN_BLOCK) * MIN_BLOCK, np.int64)
