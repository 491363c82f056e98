"""Makes a part of a step a graph of its own, and puts an order of it back into the whole order.

The part is a range of consecutive operators of an order, divided into pieces. Each piece becomes
one operator of the new graph, with the dependencies of all its operators: the other pieces can move
past it, but the order inside it stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplan.order.evaluate import held, lifetimes, positions
from memplan.types.graph import Graph, csr
from memplan.types.trace import I64

Piece = Sequence[int]


def part_of(graph: Graph, order: I64, start: int, pieces: Sequence[Piece]) -> Graph:
    """The graph whose operators are `pieces`, which run in `order` from place `start` on.

    A piece of one operator holds the same bytes as in the whole step. A piece of several operators
    holds at least as many as in `order`, because all values that it leaves alive count from its
    beginning. In another order of the pieces its bytes may differ a little, because the last use of
    a value may move into it or out of it.
    """
    piece_of = {op: piece for piece, ops in enumerate(pieces) for op in ops}
    stop = start + len(piece_of)
    before: list[set[int]] = [set() for _ in pieces]
    for op, piece in piece_of.items():
        for needed in graph.before_of(op).tolist():
            before[piece].add(piece_of.get(needed, piece))
    values = _Values(graph, order, pieces, piece_of, start, stop)
    scratch = _scratch(graph, order, start, pieces, values)
    before_start, flat_before = csr([row - {piece} for piece, row in enumerate(before)])
    users_start, users = csr(values.users)
    return Graph(
        name=[graph.name[ops[0]] for ops in pieces],
        scratch=scratch,
        before_start=before_start,
        before=flat_before,
        bytes=np.array(values.bytes, np.int64),
        maker=np.array(values.maker, np.int64),
        lasts=np.array(values.lasts, np.bool_),
        users_start=users_start,
        users=users,
        base_bytes=values.base,
    )


def composed(order: I64, start: int, pieces: Sequence[Piece], part_order: Sequence[int]) -> I64:
    """`order`, with the pieces from place `start` on in the order `part_order`."""
    run = [op for piece in part_order for op in pieces[piece]]
    return np.concatenate((order[:start], np.array(run, np.int64), order[start + len(run) :]))


class _Values:
    """The values that are alive somewhere in the range, for the graph of the part."""

    def __init__(
        self,
        graph: Graph,
        order: I64,
        pieces: Sequence[Piece],
        piece_of: dict[int, int],
        start: int,
        stop: int,
    ) -> None:
        self.bytes: list[int] = []
        self.maker: list[int] = []
        self.lasts: list[bool] = []
        self.users: list[set[int]] = []
        self.base = graph.base_bytes
        place = positions(order, len(graph))
        first, last = lifetimes(graph, order)
        for value in np.flatnonzero((first < stop) & (last > start)).tolist():
            maker = int(graph.maker[value])
            rows = graph.users_of(value)
            places = place[rows]
            lasts = bool(graph.lasts[value]) or bool((places >= stop).any())
            users = {piece_of[op] for op in rows[(places >= start) & (places < stop)].tolist()}
            made = piece_of.get(maker, -1)
            users.discard(made)
            nbytes = int(graph.bytes[value])
            if made < 0 and lasts:
                self.base += nbytes
            elif users or (made >= 0 and (lasts or len(pieces[made]) == 1)):
                self.bytes.append(nbytes)
                self.maker.append(made)
                self.lasts.append(lasts)
                self.users.append(users)


def _scratch(graph: Graph, order: I64, start: int, pieces: Sequence[Piece], values: _Values) -> I64:
    """The scratch bytes of each piece: its peak, less the values alive before it and the values
    that it makes in the graph of the part."""
    made = np.zeros(len(pieces), np.int64)
    for maker, nbytes in zip(values.maker, values.bytes, strict=True):
        if maker >= 0:
            made[maker] += nbytes
    bytes_held = held(graph, order)
    scratch = np.zeros(len(pieces), np.int64)
    place = start
    alive = _alive_before(graph, order)
    for piece, ops in enumerate(pieces):
        most = int(bytes_held[place : place + len(ops)].max())
        scratch[piece] = max(0, most - int(alive[place]) - int(made[piece]))
        place += len(ops)
    return scratch


def _alive_before(graph: Graph, order: I64) -> I64:
    """Bytes alive at each place of the order, without the results and scratch of its operator."""
    transient = graph.scratch.copy()
    made = graph.maker >= 0
    np.add.at(transient, graph.maker[made], graph.bytes[made])
    return np.asarray(held(graph, order) - transient[order], np.int64)
