"""Solves a `Problem`: the lowest layout, or one that fits a capacity.

The search is native (`native/packing`); its answer is checked before it is returned.
"""

from __future__ import annotations

import numpy as np

import memplan._native as _native
from memplan.layout.problem import MOST_BYTES, Layout, Problem, check_layout, make_layout
from memplan.types.deadline import Deadline
from memplan.types.errors import InternalError, UsageError
from memplan.types.solution import Infeasible, Solution, Solved, TimedOut

THREADS = 2
"""Fixed, because the result of the search depends on it."""


def minimise(
    problem: Problem,
    *,
    deadline: Deadline,
    within: float = 0.0,
    seed: int = 0,
) -> Solution[Layout]:
    """The lowest layout found before the deadline.

    `Solved` if no layout is lower, or only by less than the fraction `within` of the bound;
    `TimedOut`, with the best layout and bound so far, if the deadline comes; `Infeasible` if fixed
    buffers overlap. Costs and bounds are heights in bytes. The same problem and seed give the same
    layout unless the deadline comes. A first layout is made even if it has passed.
    """
    answer, layout = _pack(problem, -1, within, deadline, seed)
    if layout is None:
        return _infeasible(answer, "the fixed buffers overlap")
    bound = max(answer["bound_bytes"], problem.lower_bound)
    if layout.height <= bound + int(bound * within):
        return Solved(layout, layout.height, min(bound, layout.height))
    return TimedOut(layout, bound, layout.height)


def fit_capacity(problem: Problem, capacity: int, *, deadline: Deadline) -> Solution[Layout]:
    """A layout of at most `capacity` bytes.

    `Solved` if one is found; `Infeasible` if there is none, with rows that cannot be placed
    together; `TimedOut`, with a layout that is too high, if neither is known at the deadline.
    Otherwise as `minimise`. Raises UsageError for a negative capacity.
    """
    if capacity < 0:
        raise UsageError(f"a capacity of {capacity} bytes", "0 or more")
    capacity = min(capacity, MOST_BYTES)
    answer, layout = _pack(problem, capacity, 0.0, deadline, 0)
    if layout is None:
        return _infeasible(answer, "these buffers do not fit together")
    bound = max(answer["bound_bytes"], problem.lower_bound)
    if layout.height <= capacity:
        return Solved(layout, layout.height, bound)
    return TimedOut(layout, bound, layout.height)


def _infeasible(answer: _native.Packing, reason: str) -> Infeasible:
    return Infeasible(reason, answer["bound_bytes"], tuple(answer["witness"]))


def _pack(
    problem: Problem,
    capacity: int,
    within: float,
    deadline: Deadline,
    seed: int,
) -> tuple[_native.Packing, Layout | None]:
    """The native answer and its layout, which is checked; None where none exists."""
    offsets = np.full(len(problem), -1, np.int64)

    def pack() -> _native.Packing:
        return _native.pack(
            problem.lower, problem.upper, problem.size, problem.alignment, problem.fixed,
            problem.twin, capacity, within, deadline.left(), seed, THREADS, deadline.stop, offsets,
        )  # fmt: skip

    try:
        answer = deadline.result_of(pack)
    except ValueError as error:
        raise UsageError(f"layout: {error}") from error
    if answer["infeasible"]:
        return answer, None
    layout = make_layout(problem, offsets)
    if layout.height != max(answer["height_bytes"], 0):
        raise InternalError(
            f"the layout is {layout.height} bytes high, not {answer['height_bytes']} as was said"
        )
    check_layout(problem, layout)
    return answer, layout
