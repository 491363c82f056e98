"""The `Graph`: a whole training step as operators that may run in any order which their
dependencies allow.

An *operator* is a row, in program order. A *value* is a storage generation with all its views
(views are not values, and operators that only make views hold no bytes). Running the operators in
some order, the bytes held while operator `v` runs are

    base_bytes + Σ bytes of the values alive during v + scratch[v],

where a value is alive from the start of the operator that makes it (from the start of the step when
it is there before: maker -1) to the end of the last one that uses it (to the end of the step where
it `lasts`). So a value that nobody uses is alive during its maker only, and one that is there
before, is not used and does not last is not counted. The peak is the largest of these sums.
`StepGraph` is something else: one pass in program order, for the choice of what to recompute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Graph:
    """Columns over operators and over values. CSR: row i owns `x[x_start[i]:x_start[i + 1]]`,
    ascending, without repetition. Immutable; `check()` raises ValueError where it contradicts
    itself."""

    name: list[str]
    """The name of each operator, for messages: `aten.mm.default`."""
    scratch: I64
    """Bytes that an operator holds only while it runs, beyond values."""
    before_start: I64
    before: I64
    """Operators that must have run before this one: for its data, for mutation (reads before
    writes, writes in order), random numbers, collectives, barriers. Makers and earlier users that
    write are among them."""
    bytes: I64
    """Requested bytes of each value."""
    maker: I64
    """Operator that allocates the value; -1 where it is there before the step."""
    lasts: Bools
    """Alive to the end of the step: results, and what cannot be freed."""
    users_start: I64
    users: I64
    """Operators that read or write the value, its maker left out."""
    base_bytes: int = 0
    """Held from before the step to after it, in any order."""
    value_name: list[str] = field(default_factory=list)
    """The name of each value, for messages; empty where there are no names."""

    def __len__(self) -> int:
        return len(self.name)

    @property
    def values(self) -> int:
        return len(self.bytes)

    def before_of(self, op: int) -> I64:
        return self.before[self.before_start[op] : self.before_start[op + 1]]

    def users_of(self, value: int) -> I64:
        return self.users[self.users_start[value] : self.users_start[value + 1]]

    def check(self) -> None:
        """Raises ValueError, naming the operator or value, where columns do not fit together, a
        user does not come after the maker, or program order breaks a dependency (so no graph that
        passes has a cycle)."""
        ops, values = len(self), self.values
        for what, column, rows in (
            ("scratch", self.scratch, ops),
            ("maker", self.maker, values),
            ("lasts", self.lasts, values),
            ("value_name", self.value_name or self.bytes, values),
        ):
            if len(column) != rows:
                raise ValueError(f"column {what} has {len(column)} rows instead of {rows}")
        _check_rows("before", self.before_start, self.before, ops, ops)
        _check_rows("users", self.users_start, self.users, values, ops)
        if (self.scratch < 0).any() or (self.bytes < 0).any() or self.base_bytes < 0:
            raise ValueError("negative bytes")
        if values and not -1 <= self.maker.min() <= self.maker.max() < ops:
            raise ValueError("a maker that does not exist")
        later = np.repeat(np.arange(ops), np.diff(self.before_start))
        if (wrong := np.flatnonzero(self.before >= later)).size:
            row, needs = int(later[wrong[0]]), int(self.before[wrong[0]])
            raise ValueError(f"operator {row} must run after operator {needs}, which follows it")
        of_value = np.repeat(np.arange(values), np.diff(self.users_start))
        if (wrong := np.flatnonzero(self.users <= self.maker[of_value])).size:
            value, user = int(of_value[wrong[0]]), int(self.users[wrong[0]])
            raise ValueError(f"operator {user} uses value {value} before it is made")
        maker = self.maker[of_value]
        known = np.isin(maker * ops + self.users, self.before * ops + later) | (maker < 0)
        if (wrong := np.flatnonzero(~known)).size:
            value, user = int(of_value[wrong[0]]), int(self.users[wrong[0]])
            raise ValueError(f"operator {user} uses value {value} and need not run after its maker")


def csr(rows: Iterable[Iterable[int]]) -> tuple[I64, I64]:
    """Rows in compressed form: where each row starts, and all rows, each ascending."""
    lists = [sorted(row) for row in rows]
    start = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return start, np.array([item for row in lists for item in row], np.int64)


def _check_rows(what: str, start: I64, rows: I64, owners: int, limit: int) -> None:
    if len(start) != owners + 1 or start[0] != 0 or start[-1] != len(rows):
        raise ValueError(f"the rows of {what} do not fit")
    if (np.diff(start) < 0).any():
        raise ValueError(f"the rows of {what} do not fit")
    if len(rows) and not 0 <= rows.min() <= rows.max() < limit:
        raise ValueError(f"{what} names an operator that does not exist")
    inside = np.ones(max(len(rows) - 1, 0), bool)
    ends = start[1:-1]
    inside[ends[(ends > 0) & (ends < len(rows))] - 1] = False
    if (np.diff(rows)[inside] <= 0).any():
        raise ValueError(f"the rows of {what} are not ascending")
