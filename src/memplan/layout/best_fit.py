"""Best fit in program order (`naive`): what an allocator without foresight would do at its best.

Requests come in the order of their lifetimes' beginnings; each takes the smallest free range that
holds it, at its lower end, else the top. Free neighbours are one range.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from memplan.layout.problem import Layout, Problem, make_layout


def best_fit(problem: Problem) -> Layout:
    """Offsets. Raises ValueError for fixed buffers and twins: program order knows none."""
    if (problem.fixed >= 0).any() or (problem.twin >= 0).any():
        raise ValueError("best fit in program order cannot place fixed buffers or twins")
    count = len(problem)
    offsets = np.zeros(count, np.int64)
    times = np.concatenate((problem.upper, problem.lower))
    free = _FreeRanges()
    sizes, steps = problem.size.tolist(), problem.alignment.tolist()
    for event in np.argsort(times, kind="stable").tolist():
        row = event % count
        if event < count:
            free.release(int(offsets[row]), sizes[row])
        else:
            offsets[row] = free.take(sizes[row], steps[row])
    return make_layout(problem, offsets)


class _FreeRanges:
    """Free ranges below `top`; beyond it all is free."""

    def __init__(self) -> None:
        self.top = 0
        self._starts: list[int] = []
        self._end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    def take(self, size: int, step: int) -> int:
        for at in range(bisect_left(self._by_size, (size, -1)), len(self._by_size)):
            start = self._by_size[at][1]
            offset = -(-start // step) * step
            if offset + size <= self._end[start]:
                end = self._end[start]
                self._remove(start)
                self._add(start, offset)
                self._add(offset + size, end)
                return offset
        offset = -(-self.top // step) * step
        if self._starts and self._end[self._starts[-1]] == self.top:
            # The range below the top grows with it.
            start = self._starts[-1]
            offset = -(-start // step) * step
            self._remove(start)
            self._add(start, offset)
        else:
            self._add(self.top, offset)
        self.top = offset + size
        return offset

    def release(self, start: int, size: int) -> None:
        end = start + size
        at = bisect_right(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end:
            end = self._end[end]
            self._remove(self._starts[at])
        if at and self._end[self._starts[at - 1]] == start:
            start = self._starts[at - 1]
            self._remove(start)
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if start < end:
            insort(self._starts, start)
            self._end[start] = end
            insort(self._by_size, (end - start, start))

    def _remove(self, start: int) -> None:
        end = self._end.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
