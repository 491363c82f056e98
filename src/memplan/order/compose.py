"""A part of a step as a graph of its own, and the whole order that its order makes.

The part is a run of an order, cut into pieces; what ran before the run and what runs after it stay
outside. A piece of several operators becomes one operator, which needs what the piece needs: the
rest of the run can move past it, but its inside stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplan.order.evaluate import held, lifetimes, positions
from memplan.types.graph import Graph, csr
from memplan.types.trace import I64

Piece = Sequence[int]


def part_of(graph: Graph, order: I64, start: int, pieces: Sequence[Piece]) -> Graph:
    """The graph whose operators are `pieces`: what runs in `order` from place `start` on.

    Pieces of one operator hold what they hold in the whole step. One of several counts what is
    alive after it as made at once, so it holds no less than in `order`; and as the last use of a
    value can move into it or out of it, with another order of the part it can differ a little.
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
    """`order` with the pieces from place `start` on in another order."""
    run = [op for piece in part_order for op in pieces[piece]]
    return np.concatenate((order[:start], np.array(run, np.int64), order[start + len(run) :]))


class _Values:
    """The values that are alive somewhere in the run, as the part sees them."""

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
    """Of each piece, what it holds at most beyond what is alive before it and what it makes that
    the part knows of."""
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
    """Bytes alive before the operator at each place of the order, its own left out."""
    transient = graph.scratch.copy()
    made = graph.maker >= 0
    np.add.at(transient, graph.maker[made], graph.bytes[made])
    return np.asarray(held(graph, order) - transient[order], np.int64)
