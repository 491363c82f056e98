"""An order improved in turns: the search over all of it, and exact leaves around its peak."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from memplan.order.compose import composed, part_of
from memplan.order.evaluate import held, peak, program_order
from memplan.order.leaf import exact_order
from memplan.order.search import Clock, Improved, improve
from memplan.order.tree import Leaf, leaves
from memplan.types.graph import Graph
from memplan.types.trace import I64

ROUNDS = 4
THREADS = 2
MOST_LEAVES = 8
"""Solved in one round."""
LEAF_SECONDS = 10.0


def refine(graph: Graph, order: I64, floor: int, clock: Clock, seed: int) -> Improved:
    """An order whose peak is no higher. `floor` as in `improve`."""
    found = improve(graph, order, floor, clock)
    for turn in range(ROUNDS):
        if found.peak_bytes <= found.bound_bytes or clock.over():
            break
        candidate = _with_leaves(graph, found, clock, seed + turn)
        if peak(graph, candidate) >= found.peak_bytes:
            break
        found = improve(graph, candidate, found.bound_bytes, clock)
    return found


def _with_leaves(graph: Graph, found: Improved, clock: Clock, seed: int) -> I64:
    """The order with the leaves solved that hold more somewhere than is proved."""
    bytes_held = held(graph, found.order)
    levels = leaves(len(graph), int(bytes_held.argmax()))
    above = [leaf for leaf in levels if bytes_held[leaf.places()].max() > found.bound_bytes]
    solved = _solve_all(graph, found.order, above[:MOST_LEAVES], clock, seed)
    everything = _composed(found.order, levels, solved)
    singly = [_composed(found.order, levels, {leaf: part}) for leaf, part in solved.items()]
    return min([everything, *singly], key=lambda order: peak(graph, order))


def _solve_all(
    graph: Graph, order: I64, chosen: Sequence[Leaf], clock: Clock, seed: int
) -> dict[Leaf, I64]:
    """Of each leaf, the best order of its pieces."""

    def solve(leaf: Leaf) -> I64:
        part = part_of(graph, order, leaf.start, leaf.pieces(order))
        seconds = min(LEAF_SECONDS, clock.left)
        return exact_order(part, program_order(part), seed=seed, seconds=seconds, clock=clock)

    with ThreadPoolExecutor(THREADS) as pool, clock.stopped_by_errors():
        return dict(zip(chosen, pool.map(solve, chosen), strict=True))


def _composed(order: I64, levels: Sequence[Leaf], solved: dict[Leaf, I64]) -> I64:
    """From the innermost level outward, each around the one before."""
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
