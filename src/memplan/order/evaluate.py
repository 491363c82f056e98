"""The bytes that an order holds, in one sweep over the ends of lifetimes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memplan.types.graph import Graph
from memplan.types.trace import I64


def program_order(graph: Graph) -> I64:
    return np.arange(len(graph), dtype=np.int64)


def positions(order: npt.ArrayLike, count: int) -> I64:
    """The place of each operator in the order. Raises ValueError if it is no permutation."""
    rows = np.asarray(order, np.int64)
    place = np.full(count, -1, np.int64)
    inside = rows.ndim == 1 and (not len(rows) or (rows.min() >= 0 and rows.max() < count))
    if inside:
        place[rows] = np.arange(len(rows))
    if not inside or len(rows) != count or (place < 0).any():
        raise ValueError("the order does not name every operator once")
    return place


def lifetimes(graph: Graph, order: npt.ArrayLike) -> tuple[I64, I64]:
    """The places `[start, stop)` of the order during which each value is alive; both are equal for
    a value that never is. Raises ValueError if `order` is no permutation."""
    place = positions(order, len(graph))
    made = graph.maker >= 0
    start = np.zeros(graph.values, np.int64)
    start[made] = place[graph.maker[made]]
    stop = np.where(made, start + 1, 0)
    used = np.flatnonzero(np.diff(graph.users_start))
    if len(used):
        last = np.maximum.reduceat(place[graph.users], graph.users_start[used])
        stop[used] = np.maximum(stop[used], last + 1)
    stop[graph.lasts] = len(graph)
    return start, stop


def held(graph: Graph, order: npt.ArrayLike) -> I64:
    """Bytes held while the operator at each place of the order runs.

    Dependencies are not checked. Raises ValueError if `order` is no permutation.
    """
    start, stop = lifetimes(graph, order)
    change = np.zeros(len(graph) + 1, np.int64)
    np.add.at(change, start, graph.bytes)
    np.subtract.at(change, stop, graph.bytes)
    rows = np.asarray(order, np.int64)
    return np.asarray(np.cumsum(change)[:-1] + graph.scratch[rows] + graph.base_bytes, np.int64)


def peak(graph: Graph, order: npt.ArrayLike) -> int:
    """The most bytes held at any place of the order; `base_bytes` for a graph without operators."""
    return int(held(graph, order).max(initial=graph.base_bytes))
