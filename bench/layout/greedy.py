"""Greedy by size: the simplest baseline for the solvers.

The largest buffer first, each to the lowest offset that is free over its whole lifetime (Pisarchyk
and Lee, "Efficient memory management for deep neural net inference", 2020). Takes time quadratic in
the number of buffers.
"""

from __future__ import annotations

import numpy as np

from memplan.layout.problem import Layout, Problem, make_layout
from memplan.types.trace import I64


def greedy_by_size(problem: Problem) -> Layout:
    """Offsets; fixed buffers keep theirs. Ties go to the longer lifetime, then to the lower row.
    Raises ValueError for twins."""
    if (problem.twin >= 0).any():
        raise ValueError("greedy by size cannot place twins")
    lifetime = problem.upper - problem.lower
    order = np.lexsort((-lifetime, -problem.size, problem.fixed < 0))
    lower, upper, size = problem.lower[order], problem.upper[order], problem.size[order]
    offsets = np.zeros(len(problem), np.int64)
    placed = np.zeros(len(problem), np.int64)
    for k, row in enumerate(order.tolist()):
        if problem.fixed[row] >= 0:
            offset = int(problem.fixed[row])
        else:
            together = (lower[:k] < upper[k]) & (lower[k] < upper[:k])
            offset = lowest_gap(
                placed[:k][together], size[:k][together], int(size[k]), int(problem.alignment[row])
            )
        placed[k] = offsets[row] = offset
    return make_layout(problem, offsets)


def lowest_gap(starts: I64, sizes: I64, size: int, alignment: int) -> int:
    """The lowest multiple of `alignment` at which `size` bytes miss all `[start, start + size)`."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    # Where the free space before each of them begins, and after the last.
    ends = np.maximum.accumulate(begins + sizes[order])
    free = -(-np.concatenate(([0], ends)) // alignment) * alignment
    fits = free[:-1] + size <= begins
    return int(free[int(fits.argmax())] if fits.any() else free[-1])
