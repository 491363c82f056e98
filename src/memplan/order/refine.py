"""Improves an order in turns, by a search over all of it and by optimal orders around its peak.

Activations live from a part of forward to the matching part of backward. So ROAM (Shu et al. 2023)
pairs segments of forward and backward, from the loss outward, and solves each pair together; pairs
are merged up to a limit of operators. Here the pairs follow the best order known, from its peak
outward: level 0 has the operators around the peak. Level k has those just before and just after
level k - 1, which stands between them as one operator. A level is called a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import memplan._native as _native
from memplan.order.compose import Piece, composed, part_of
from memplan.order.evaluate import held, peak, program_order
from memplan.order.leaf import Exact, exact_order
from memplan.types.deadline import Deadline
from memplan.types.errors import InternalError
from memplan.types.graph import Graph
from memplan.types.trace import I64

NODES = 60
"""The most operators of a leaf, with the inner levels counted as one. CP-SAT proves an optimum of
that size in seconds."""
ROUNDS = 4
THREADS = 2
MOST_LEAVES = 8
"""The most leaves that are solved in one round."""
LEAF_WORK = 4.0
"""The most work for one leaf, in the units of `exact_order`."""
ALL_WORK = 24.0
"""The most work for all leaves of all rounds: about 13 seconds with two threads."""
NEARLY = 1.001
"""No leaves are solved for a peak of at most this factor times the lower bound: they would gain
less than their time is worth."""


def refine(graph: Graph, order: I64, floor: int, deadline: Deadline, seed: int) -> Improved:
    """An order whose peak is not higher than that of `order`. `floor`: see `improve`."""
    found = improve(graph, order, floor, deadline)
    work = ALL_WORK
    for turn in range(ROUNDS):
        if found.peak_bytes <= NEARLY * found.bound_bytes or deadline.passed:
            break
        candidate, done = _with_leaves(graph, found, work, deadline, seed + turn)
        work -= done
        if peak(graph, candidate) >= found.peak_bytes:
            break
        found = improve(graph, candidate, found.bound_bytes, deadline)
    return found


def _with_leaves(
    graph: Graph, found: Improved, work: float, deadline: Deadline, seed: int
) -> Exact:
    """The order after solving those leaves that hold more than the lower bound somewhere."""
    bytes_held = held(graph, found.order)
    levels = leaves(len(graph), int(bytes_held.argmax()))
    above = [leaf for leaf in levels if bytes_held[leaf.places()].max() > found.bound_bytes]
    exact = _solve_all(graph, found.order, above[:MOST_LEAVES], work, deadline, seed)
    solved = {leaf: one.order for leaf, one in exact.items()}
    everything = _composed(found.order, levels, solved)
    singly = [_composed(found.order, levels, {leaf: part}) for leaf, part in solved.items()]
    best = min([everything, *singly], key=lambda order: peak(graph, order))
    return Exact(best, sum(one.work for one in exact.values()))


def _solve_all(
    graph: Graph, order: I64, chosen: Sequence[Leaf], work: float, deadline: Deadline, seed: int
) -> dict[Leaf, Exact]:
    """The best order of each leaf's pieces. Each leaf gets an equal share of the work: if one could
    use what others leave, the result would depend on which of them ends first."""
    share = min(LEAF_WORK, work / max(1, len(chosen)))

    def solve(leaf: Leaf) -> Exact:
        part = part_of(graph, order, leaf.start, leaf.pieces(order))
        return exact_order(part, program_order(part), seed=seed, work=share, deadline=deadline)

    with ThreadPoolExecutor(THREADS) as pool, deadline.ended_by_errors():
        return dict(zip(chosen, pool.map(solve, chosen), strict=True))


def _composed(order: I64, levels: Sequence[Leaf], solved: dict[Leaf, I64]) -> I64:
    """Put the orders of leaves into the whole order, from the innermost level outward."""
    result = order
    inner: list[int] = []
    for leaf in levels:
        pieces = leaf.pieces(order)
        if leaf.inner_start < leaf.inner_stop:
            pieces[leaf.inner_start - leaf.start] = inner
        part_order = solved.get(leaf, np.arange(len(pieces)))
        result = composed(order, leaf.start, pieces, part_order.tolist())
        inner = result[leaf.start : leaf.stop].tolist()
    return result


@dataclass(frozen=True)
class Leaf:
    """Places `[start, stop)` of an order, of which `[inner_start, inner_stop)` are the inner levels
    and count as one operator."""

    start: int
    inner_start: int
    inner_stop: int
    stop: int

    def pieces(self, order: I64) -> list[Piece]:
        """A piece for each operator, and one for the inner levels."""
        left = [[op] for op in order[self.start : self.inner_start].tolist()]
        inner = order[self.inner_start : self.inner_stop].tolist()
        right = [[op] for op in order[self.inner_stop : self.stop].tolist()]
        return [*left, *([inner] if inner else []), *right]

    def places(self) -> list[int]:
        """The places without those of the inner levels."""
        return [*range(self.start, self.inner_start), *range(self.inner_stop, self.stop)]


def leaves(count: int, peak_place: int, nodes: int = NODES) -> list[Leaf]:
    """The levels of an order of `count` operators, the innermost first. Together they cover the
    order. Each has at most `nodes` operators (4 or more), with the inner levels counted as one."""
    side = max(1, (nodes - 1) // 2)
    start = stop = peak_place
    found = []
    while start > 0 or stop < count:
        room = nodes if start == stop else nodes - 1
        left = min(side, start)
        right = min(room - left, count - stop)
        left = min(room - right, start)
        found.append(Leaf(start - left, start, stop, stop + right))
        start, stop = start - left, stop + right
    return found


_NODES = 500
"""Sets of operators that the native search tries before it accepts one that holds more."""


@dataclass(frozen=True)
class Improved:
    """The result of the search."""

    order: I64
    peak_bytes: int
    bound_bytes: int
    """A lower bound on the peak of every order, as far as the search proved it."""


def improve(graph: Graph, order: npt.ArrayLike, floor: int, deadline: Deadline) -> Improved:
    """An order whose peak is not higher than that of `order`, and lower where the native search
    finds one (`native/order/search.hpp`; docs/order.md, "The search").

    `floor`: a known lower bound on the peak, in bytes. The same input gives the same answer unless
    the deadline comes. Raises ValueError if `order` is no order of the graph.
    """
    rows = np.array(order, np.int64)
    answer = deadline.result_of(
        lambda: _native.improve_order(
            graph.scratch, graph.before_start, graph.before, graph.bytes, graph.maker,
            graph.lasts.astype(np.uint8), graph.users_start, graph.users, graph.base_bytes,
            rows, floor, _NODES, deadline.left(), deadline.stop,
        )
    )  # fmt: skip
    if peak(graph, rows) != answer[0]:
        raise InternalError(f"the order's peak is {peak(graph, rows)}, not {answer[0]} as was said")
    return Improved(rows, *answer)
