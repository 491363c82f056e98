"""A check fast enough to run on every answer: one sweep over the ends of lifetimes."""

from __future__ import annotations

from memplan.layout.problem import Layout, Problem
from memplan.types.allocation import find_overlap
from memplan.types.errors import InternalError


def check_layout(problem: Problem, layout: Layout, capacity: int | None = None) -> None:
    """Raise InternalError, with the buffers, unless the layout is valid and its height true."""
    offsets, ends = layout.offsets, layout.offsets + problem.size
    if (offsets < 0).any() or (offsets % problem.alignment).any():
        raise _invalid("an offset is negative or not aligned")
    if ((problem.fixed >= 0) & (offsets != problem.fixed)).any():
        raise _invalid("a fixed buffer was moved")
    if ((problem.twin >= 0) & (offsets != offsets[problem.twin])).any():
        raise _invalid("twins have different offsets")
    height = int(ends.max(initial=0))
    if height != layout.height or (capacity is not None and height > capacity):
        raise _invalid(f"it is {height} bytes high, not {layout.height} within {capacity}")
    pair = find_overlap(problem.lower, problem.upper, offsets, problem.size)
    if pair is not None:
        raise _invalid(f"{problem.ids[pair[0]]} and {problem.ids[pair[1]]} overlap")


def _invalid(why: str) -> InternalError:
    return InternalError(f"the layout that was found is not valid: {why}", "please report it")
