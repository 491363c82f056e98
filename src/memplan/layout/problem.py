"""A `Problem` of dynamic storage allocation, in columns, and its solution, a `Layout`.

Given the lifetime and size of each buffer, choose offsets so that buffers that are alive at once do
not overlap. The height, which is the end of the highest buffer, is to be as low as possible. The
most bytes alive at once (the maximum load) are a lower bound on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memplan.types.allocation import find_overlap
from memplan.types.errors import InternalError, UsageError
from memplan.types.trace import I64

MOST_BYTES = (1 << 63) - 1
"""The sum of all sizes must stay below this, so that no sum can overflow."""
_MOST_TIME = 1 << 62


class ProblemError(UsageError):
    """A row of a problem that is not valid.

    Attributes:
        row: its number, from 0.
        why: what is wrong with it.
    """

    def __init__(self, row: int, why: str) -> None:
        super().__init__(f"row {row}: {why}")
        self.row = row
        self.why = why


@dataclass(frozen=True)
class Problem:
    """One row for each buffer. Raises ProblemError for the first row that is not valid."""

    ids: tuple[str, ...]
    lower: I64
    """First moment of its lifetime `[lower, upper)`."""
    upper: I64
    size: I64
    """Bytes."""
    alignment: I64
    """The offset is a multiple of this; 1 for any offset."""
    fixed: I64
    """The offset that it must have; -1 for any."""
    twin: I64
    """Another row that must have the same offset, and whose twin is this row; -1 for none. Twins
    have the same size, no fixed offset, and are never alive together."""

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def max_load(self) -> int:
        """The most bytes alive at one moment."""
        if not len(self):
            return 0
        times = np.concatenate((self.lower, self.upper))
        change = np.concatenate((self.size, -self.size))
        order = np.argsort(times, kind="stable")
        load = np.cumsum(change[order])
        # Buffers that end at a moment are gone before others begin at it. So only the sum after the
        # last change of a moment counts.
        last = np.append(np.diff(times[order]) != 0, True)
        return int(load[last].max())

    @cached_property
    def lower_bound(self) -> int:
        """No layout is lower: the maximum load, or the end of the highest fixed buffer."""
        is_fixed = self.fixed >= 0
        ends = self.fixed[is_fixed] + self.size[is_fixed]
        return max(self.max_load, int(ends.max(initial=0)))


def make_problem(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    alignment: npt.ArrayLike | None = None,
    fixed: npt.ArrayLike | None = None,
    twin: npt.ArrayLike | None = None,
    ids: tuple[str, ...] | None = None,
) -> Problem:
    """A problem from columns. By default rows are numbered from 0, and have no alignment, fixed
    offset or twin.

    Raises ProblemError for a row that is not valid, ValueError for columns that differ in length.
    """
    lower = np.ascontiguousarray(lower, np.int64)
    count = len(lower)
    return Problem(
        ids=tuple(map(str, range(count))) if ids is None else ids,
        lower=lower,
        upper=np.ascontiguousarray(upper, np.int64),
        size=np.ascontiguousarray(size, np.int64),
        alignment=_column(alignment, 1, count),
        fixed=_column(fixed, -1, count),
        twin=_column(twin, -1, count),
    )


def _column(values: npt.ArrayLike | None, default: int, count: int) -> I64:
    if values is None:
        return np.full(count, default, np.int64)
    return np.ascontiguousarray(values, np.int64)


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes, by row of the problem, and the end of the highest buffer."""

    offsets: I64
    height: int


def make_layout(problem: Problem, offsets: I64) -> Layout:
    """A layout with its height. It is not checked."""
    return Layout(offsets, int((offsets + problem.size).max(initial=0)))


def _check(problem: Problem) -> None:
    count = len(problem.ids)
    columns = (
        problem.lower, problem.upper, problem.size, problem.alignment, problem.fixed, problem.twin,
    )  # fmt: skip
    if any(column.shape != (count,) or column.dtype != np.int64 for column in columns):
        raise ValueError(f"columns of {[column.shape for column in columns]} for {count} buffers")
    lower, upper, size, alignment, fixed, twin = columns
    outside = (lower < -_MOST_TIME) | (lower > _MOST_TIME) | (upper > _MOST_TIME)
    _refuse(outside, lambda row: f"lifetime [{lower[row]}, {upper[row]}) is out of range")
    _refuse(lower >= upper, lambda row: f"lower {lower[row]} is not below upper {upper[row]}")
    _refuse(size <= 0, lambda row: f"size {size[row]} is not above 0")
    _refuse(alignment < 1, lambda row: f"alignment {alignment[row]} is not above 0")
    _refuse(fixed < -1, lambda row: f"offset {fixed[row]} is negative")
    misplaced = (fixed >= 0) & (fixed % np.maximum(alignment, 1) != 0)
    _refuse(
        misplaced, lambda row: f"offset {fixed[row]} is no multiple of alignment {alignment[row]}"
    )
    _refuse(fixed > MOST_BYTES - size, lambda row: "offset + size is beyond 2^63")
    _refuse((twin < -1) | (twin >= count), lambda row: f"twin {twin[row]} is no row")
    has, rows = twin >= 0, np.arange(count)
    other = np.where(has, twin, rows)
    apart = (upper <= lower[other]) | (upper[other] <= lower)
    alike = (size == size[other]) & (alignment == alignment[other]) & (fixed < 0) & apart
    _refuse(has & ~(alike & (twin[other] == rows)), lambda row: f"row {twin[row]} is no twin of it")
    _check_sum(size, alignment)
    _check_ids(problem.ids)


def _refuse(faulty: npt.NDArray[np.bool_], why: Callable[[int], str]) -> None:
    if faulty.any():
        row = int(faulty.argmax())
        raise ProblemError(row, why(row))


def _check_sum(size: I64, alignment: I64) -> None:
    """Check that all buffers, each with its alignment, can be stacked without an overflow."""
    if float(size.sum(dtype=np.float64)) + float(alignment.sum(dtype=np.float64)) < 2.0**62:
        return
    total = 0
    for row, (nbytes, step) in enumerate(zip(size.tolist(), alignment.tolist(), strict=True)):
        total += nbytes + step - 1
        if total > MOST_BYTES:
            raise ProblemError(row, "the sizes up to here sum to more than 2^63 bytes")


def _check_ids(ids: tuple[str, ...]) -> None:
    if len(set(ids)) == len(ids):
        return
    first: dict[str, int] = {}
    for row, name in enumerate(ids):
        if first.setdefault(name, row) != row:
            raise ProblemError(row, f"id {name!r} is that of an earlier row as well")


def check_layout(problem: Problem, layout: Layout) -> None:
    """Raise InternalError, with the buffers, unless the layout is valid and its height is right.

    One sweep over the ends of lifetimes, fast enough to check every answer.
    """
    offsets, ends = layout.offsets, layout.offsets + problem.size
    if (offsets < 0).any() or (offsets % problem.alignment).any():
        raise _invalid("an offset is negative or not aligned")
    if ((problem.fixed >= 0) & (offsets != problem.fixed)).any():
        raise _invalid("a fixed buffer was moved")
    if ((problem.twin >= 0) & (offsets != offsets[problem.twin])).any():
        raise _invalid("twins have different offsets")
    height = int(ends.max(initial=0))
    if height != layout.height:
        raise _invalid(f"it is {height} bytes high, not {layout.height}")
    pair = find_overlap(problem.lower, problem.upper, offsets, problem.size)
    if pair is not None:
        raise _invalid(f"{problem.ids[pair[0]]} and {problem.ids[pair[1]]} overlap")


def _invalid(why: str) -> InternalError:
    return InternalError(f"the layout that was found is not valid: {why}", "please report it")
