"""A check fast enough to run on every answer: one sweep over the ends of lifetimes."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from memplan.layout.problem import Layout, Problem
from memplan.types.errors import InternalError


def check_layout(problem: Problem, layout: Layout, capacity: int | None = None) -> None:
    """Raise InternalError, with the buffers, unless the layout is valid and its height true."""
    offsets, ends = layout.offsets, layout.offsets + problem.size
    if (offsets < 0).any() or (offsets % problem.alignment).any():
        raise _invalid("an offset is negative or not aligned")
    if ((problem.fixed >= 0) & (offsets != problem.fixed)).any():
        raise _invalid("a fixed buffer was moved")
    height = int(ends.max(initial=0))
    if height != layout.height or (capacity is not None and height > capacity):
        raise _invalid(f"it is {height} bytes high, not {layout.height} within {capacity}")
    pair = _overlap(problem, layout)
    if pair is not None:
        raise _invalid(f"{problem.ids[pair[0]]} and {problem.ids[pair[1]]} overlap")


def _overlap(problem: Problem, layout: Layout) -> tuple[int, int] | None:
    """Two rows that share bytes at some moment."""
    count = len(problem)
    times = np.concatenate((problem.upper, problem.lower))
    # At one moment, what ends is gone before what begins: the ends come first among equals.
    order = np.argsort(times, kind="stable").tolist()
    offsets = layout.offsets.tolist()
    ends = (layout.offsets + problem.size).tolist()
    starts_alive: list[int] = []
    rows_alive: list[int] = []
    for event in order:
        row = event % count
        at = bisect_left(starts_alive, offsets[row])
        if event < count:
            del starts_alive[at], rows_alive[at]
            continue
        if at < len(starts_alive) and starts_alive[at] < ends[row]:
            return rows_alive[at], row
        if at and ends[rows_alive[at - 1]] > offsets[row]:
            return rows_alive[at - 1], row
        starts_alive.insert(at, offsets[row])
        rows_alive.insert(at, row)
    return None


def _invalid(why: str) -> InternalError:
    return InternalError(f"the layout that was found is not valid: {why}", "please report it")
