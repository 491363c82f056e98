"""Whether a layout is one, the O(n²) way: every pair of buffers is looked at.

Shares no code with the solvers, nor with the faster check that runs on every answer.
"""

from __future__ import annotations

from memplan.layout.problem import Problem
from memplan.types.trace import I64


def validate(problem: Problem, offsets: I64, capacity: int | None = None) -> str:
    """Empty when the layout is valid, else the first reason why not.

    Valid: every offset is at least 0, a multiple of its alignment, the fixed one and its twin's
    where there is one; no two buffers alive at once overlap; with a `capacity`, none ends beyond
    it.
    """
    if len(offsets) != len(problem):
        return f"{len(offsets)} offsets for {len(problem)} buffers"
    rows = [
        (problem.ids[i], int(problem.lower[i]), int(problem.upper[i]), int(offsets[i]),
         int(offsets[i]) + int(problem.size[i]), int(problem.alignment[i]), int(problem.fixed[i]))
        for i in range(len(problem))
    ]  # fmt: skip
    for name, _, _, start, end, alignment, fixed in rows:
        if start < 0:
            return f"{name} has no offset"
        if start % alignment:
            return f"{name} at {start} is not aligned to {alignment}"
        if fixed >= 0 and start != fixed:
            return f"{name} at {start} must be at {fixed}"
        if capacity is not None and end > capacity:
            return f"{name} ends at {end}, beyond {capacity}"
    for i, twin in enumerate(problem.twin.tolist()):
        if twin >= 0 and offsets[i] != offsets[twin]:
            return f"{problem.ids[i]} and its twin {problem.ids[twin]} have different offsets"
    for i, (name, lower, upper, start, end, *_) in enumerate(rows):
        for other, lower2, upper2, start2, end2, *_ in rows[i + 1 :]:
            if lower < upper2 and lower2 < upper and start < end2 and start2 < end:
                return f"{name} and {other} overlap"
    return ""
