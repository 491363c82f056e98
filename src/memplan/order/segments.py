"""Operators whose place is the same in every order, and the independent segments between them.

An operator with `a` operators that must run before it and `d` that must run after it runs at one of
the places a … N − 1 − d. Where the two are equal its place is fixed (ROAM calls it
memory-insensitive, Shu et al. 2023), and so is the set of operators that run before it. What the
segments between fixed operators hold does not depend on each other's order: the peak is the largest
of theirs.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memplan.types.graph import Graph
from memplan.types.trace import I64


def windows(graph: Graph) -> tuple[I64, I64]:
    """Of each operator, the first and the last place that it can have in an order. Takes memory
    quadratic in the operators: for small graphs."""
    count = len(graph)
    ancestors, descendants = [0] * count, [0] * count
    for op in range(count):
        for needed in graph.before_of(op).tolist():
            ancestors[op] |= ancestors[needed] | 1 << needed
    for op in reversed(range(count)):
        for needed in graph.before_of(op).tolist():
            descendants[needed] |= descendants[op] | 1 << op
    first = np.array([reached.bit_count() for reached in ancestors], np.int64)
    after = np.array([reached.bit_count() for reached in descendants], np.int64)
    return first, count - 1 - after


def fixed_operators(graph: Graph) -> I64:
    """The operators, ascending, that have the same place in every order: that of program order.

    Everything before `v` in program order leads to it when each of these has a successor no later
    than `v`, and everything after it comes from it when each of those has a predecessor no earlier.
    """
    count = len(graph)
    later = np.repeat(np.arange(count), np.diff(graph.before_start))
    next_one = np.full(count, count, np.int64)
    np.minimum.at(next_one, graph.before, later)
    last_one = np.full(count, -1, np.int64)
    np.maximum.at(last_one, later, graph.before)
    rows = np.arange(count)
    reached_by = np.concatenate(([-1], np.maximum.accumulate(next_one)[:-1])) if count else rows
    leads_to = np.concatenate((np.minimum.accumulate(last_one[::-1])[::-1][1:], [count]))[:count]
    return np.flatnonzero((reached_by <= rows) & (leads_to >= rows))


def segments(graph: Graph) -> list[range]:
    """Program order in pieces: each fixed operator, and what lies between two of them. Every order
    runs them one after the other."""
    fixed = fixed_operators(graph).tolist()
    pieces: list[range] = []
    for left, right in pairwise([-1, *fixed, len(graph)]):
        if right - left > 1:
            pieces.append(range(left + 1, right))
        if right < len(graph):
            pieces.append(range(right, right + 1))
    return pieces
