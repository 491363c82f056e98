"""What is left of an order's gain once its values have addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.layout.problem import Problem, make_problem
from memplan.layout.solve import minimise
from memplan.order.evaluate import lifetimes, program_order
from memplan.simulate.rounding import MIN_BLOCK
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.solution import Infeasible, Solved
from memplan.types.trace import I64

WITHIN = 0.001
"""So small a part above the most bytes alive at once, a layout is low enough."""


@dataclass(frozen=True)
class Laid:
    """An order with an address for each value, sizes rounded up to the allocator's blocks."""

    height_bytes: int
    load_bytes: int
    """The most bytes of blocks alive at once: no layout is lower."""

    @property
    def fragmentation(self) -> float:
        """The part of the height that is never needed."""
        return 1 - self.load_bytes / self.height_bytes if self.height_bytes else 0.0


@dataclass(frozen=True)
class Layouts:
    """Program order and another one."""

    program: Laid
    ordered: Laid

    @property
    def saved(self) -> float:
        """By how much the order and the layout together are below the layout of program order."""
        if not self.program.height_bytes:
            return 0.0
        return 1 - self.ordered.height_bytes / self.program.height_bytes


def lay_out(graph: Graph, order: I64, *, deadline: Deadline) -> Layouts:
    """Layouts of both orders: one within half of the time, the other within what is left."""
    half = deadline.part(2)
    return Layouts(_laid(graph, program_order(graph), half), _laid(graph, order, deadline))


def _laid(graph: Graph, order: I64, deadline: Deadline) -> Laid:
    problem, always = _problem(graph, order)
    answer = minimise(problem, deadline=deadline, within=WITHIN)
    assert not isinstance(answer, Infeasible)  # nothing is fixed
    layout = answer.solution if isinstance(answer, Solved) else answer.best
    height = layout.height if layout is not None else int(problem.size.sum())
    return Laid(always + height, always + problem.max_load)


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
