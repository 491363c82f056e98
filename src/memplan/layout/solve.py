"""The two questions about a `Problem`: its least height, and whether it fits a capacity.

The search is native (`native/packing`); what it answers is checked before it is returned.
"""

from __future__ import annotations

import threading
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

import memplan._native as _native
from memplan.layout.check import check_layout
from memplan.layout.problem import MOST_BYTES, Layout, Problem, make_layout
from memplan.types.errors import InternalError, UsageError
from memplan.types.solution import Infeasible, Solution, Solved, TimedOut

Cancel: TypeAlias = npt.NDArray[np.uint8]
"""One byte; the search stops soon after it is set to another value than 0."""


THREADS = 2
"""Part of the question: with another number the search goes another way."""


def new_cancel() -> Cancel:
    return np.zeros(1, np.uint8)


def minimise(
    problem: Problem,
    *,
    seconds: float,
    within: float = 0.0,
    seed: int = 0,
    cancel: Cancel | None = None,
) -> Solution[Layout]:
    """The lowest layout found within `seconds`.

    `Solved` when it is proved that none is lower, or lower by more than the part `within` of the
    bound; `TimedOut` with the best found and the bound proved when time ran out or `cancel` was
    set; `Infeasible` when fixed buffers overlap. Costs and bounds are heights in bytes. The same
    problem and seed give the same layout unless time runs out. A first layout is made
    whatever the time.
    """
    answer, layout = _pack(problem, -1, within, seconds, seed, cancel)
    if layout is None:
        return _infeasible(answer, "the fixed buffers overlap")
    bound = max(answer["bound_bytes"], problem.lower_bound)
    if layout.height <= bound + int(bound * within):
        return Solved(layout, layout.height, min(bound, layout.height))
    return TimedOut(layout, bound, layout.height)


def fit_capacity(
    problem: Problem,
    capacity: int,
    *,
    seconds: float,
    cancel: Cancel | None = None,
) -> Solution[Layout]:
    """A layout of at most `capacity` bytes.

    `Solved` with one; `Infeasible` when it is proved that there is none, with rows that cannot be
    placed together; `TimedOut` when neither was found, with a layout that is too high. Otherwise
    as `minimise`.
    """
    if capacity < 0:
        raise UsageError(f"a capacity of {capacity} bytes", "0 or more")
    capacity = min(capacity, MOST_BYTES)
    answer, layout = _pack(problem, capacity, 0.0, seconds, 0, cancel)
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
    seconds: float,
    seed: int,
    cancel: Cancel | None,
) -> tuple[_native.Packing, Layout | None]:
    """The native answer, and its layout, checked; None where it is proved that there is none."""
    offsets = np.full(len(problem), -1, np.int64)
    answers: list[_native.Packing] = []
    errors: list[BaseException] = []
    done, stop = threading.Event(), new_cancel() if cancel is None else cancel

    def search() -> None:
        try:
            answers.append(
                _native.pack(
                    problem.lower, problem.upper, problem.size, problem.alignment, problem.fixed,
                    problem.twin, capacity, within, seconds, seed, THREADS, stop, offsets,
                )
            )  # fmt: skip
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    # In a thread of its own: Python runs signal handlers in the main thread, which waits in a way
    # that lets them run, and one of them may set `cancel`. Not join: Ctrl-C in it has Python 3.11
    # take the thread for ended, and exit under it.
    worker = threading.Thread(target=search, name="memplan-layout")
    try:
        worker.start()
        while not done.wait(0.1):  # a signal that comes as the wait begins is handled afterwards
            pass
    except BaseException:
        stop[0] = 1
        raise
    if errors:
        if isinstance(errors[0], ValueError):
            raise UsageError(f"layout: {errors[0]}") from errors[0]
        raise errors[0]
    answer = answers[0]
    if answer["status"] == "infeasible":
        return answer, None
    layout = make_layout(problem, offsets)
    if layout.height != max(answer["height_bytes"], 0):
        raise InternalError(
            f"the layout is {layout.height} bytes high, not {answer['height_bytes']} as was said"
        )
    check_layout(problem, layout)
    return answer, layout
