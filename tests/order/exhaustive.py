"""The optimal order of a small graph: every set of operators that can have run is looked at.

What is alive after a set of operators ran does not depend on the order in which they did. So the
least peak with which a set can be reached follows from the sets with one operator less: dynamic
programming over the down-sets of the dependencies (for one-processor scheduling, Lawler 1979). They
number up to 2^ops: meant for at most about 20 operators.
"""

from __future__ import annotations

import numpy as np

from memplan.types.graph import Graph
from memplan.types.trace import I64

MOST_OPERATORS = 24


def exhaustive_order(graph: Graph) -> tuple[I64, int]:
    """An order of the least peak, and that peak in bytes. Raises ValueError for more than
    `MOST_OPERATORS` operators."""
    count = len(graph)
    if count > MOST_OPERATORS:
        raise ValueError(f"{count} operators are too many to try all orders")
    table = _Table(graph)
    reached: dict[int, tuple[int, int]] = {0: (graph.base_bytes, -1)}
    levels = [reached]
    for _ in range(count):
        following: dict[int, tuple[int, int]] = {}
        for done, (most, _) in levels[-1].items():
            for op in table.ready(done):
                peak = max(most, table.held(done, op))
                after = done | 1 << op
                if after not in following or following[after][0] > peak:
                    following[after] = peak, op
        levels.append(following)
    done = (1 << count) - 1
    peak = levels[-1][done][0]
    backwards: list[int] = []
    for level in reversed(levels[1:]):
        op = level[done][1]
        backwards.append(op)
        done ^= 1 << op
    return np.array(backwards[::-1], np.int64), peak


class _Table:
    """Sets of operators as bits of an integer."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.before = [_bits(graph.before_of(op)) for op in range(len(graph))]
        users = [_bits(graph.users_of(value)) for value in range(graph.values)]
        columns = graph.maker.tolist(), users, graph.lasts.tolist(), graph.bytes.tolist()
        self.values: list[tuple[int, int, bool, int]] = list(zip(*columns, strict=True))

    def ready(self, done: int) -> list[int]:
        """What can run next."""
        return [
            op
            for op, needs in enumerate(self.before)
            if not done >> op & 1 and needs & done == needs
        ]

    def held(self, done: int, op: int) -> int:
        """Bytes while `op` runs after exactly `done`."""
        total = self.graph.base_bytes + int(self.graph.scratch[op])
        for maker, users, lasts, nbytes in self.values:
            there = maker in (-1, op) or bool(done >> maker & 1)
            if there and (maker == op or lasts or users & ~done):
                total += nbytes
        return total


def _bits(rows: I64) -> int:
    return sum(1 << int(row) for row in rows)
