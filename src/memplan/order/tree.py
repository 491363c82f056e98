"""The subgraphs that are solved exactly, paired outward from the peak.

ROAM (Shu et al. 2023) pairs segments of forward with those of backward outward from the loss and
merges them up to a node limit: activations live from one side to the other, so that what shares
them is solved together. Here the pairs follow the best order known, outward from its peak: level 0
is what runs around the peak, and level k what runs just before and just after level k − 1, which
stands between the two sides as one operator.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.order.compose import Piece
from memplan.types.trace import I64

NODES = 60
"""Operators of a leaf at most, the inner levels counted as one. CP-SAT proves the optimum of such
in seconds."""


@dataclass(frozen=True)
class Leaf:
    """Places `[start, stop)` of an order; `[inner_start, inner_stop)` of them is one operator."""

    start: int
    inner_start: int
    inner_stop: int
    stop: int

    def pieces(self, order: I64) -> list[Piece]:
        """The operators, one a piece but for the inner levels."""
        left = [[op] for op in order[self.start : self.inner_start].tolist()]
        inner = order[self.inner_start : self.inner_stop].tolist()
        right = [[op] for op in order[self.inner_stop : self.stop].tolist()]
        return [*left, *([inner] if inner else []), *right]

    def places(self) -> list[int]:
        """Without those of the inner levels."""
        return [*range(self.start, self.inner_start), *range(self.inner_stop, self.stop)]


def leaves(count: int, peak_place: int, nodes: int = NODES) -> list[Leaf]:
    """The levels of an order of `count` operators, the innermost first. They cover it, each with at
    most `nodes` operators (at least 4), the inner levels counted as one."""
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
