"""What proves a lower bound, for anyone to check: see `check_bound`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.types.trace import I64


@dataclass(frozen=True)
class Amounts:
    """Bytes by row of a column of the graph; rows that are not named have none."""

    rows: I64
    bytes: I64

    @classmethod
    def of(cls, column: I64) -> Amounts:
        rows = np.flatnonzero(column).astype(np.int64)
        return cls(rows, column[rows])


@dataclass(frozen=True)
class Flow:
    """A flow of bytes from what must have run before operator `op`, and from what is there before
    the step, to what must run after it.

    Each value hands its bytes to users, who answer for their being held as long as they have not
    run, and to the end of the step where it lasts; each operator hands what reaches it to its own
    values, or back to operators that must run before it.
    """

    op: int
    """-1: the start of the step; the number of operators: its end."""
    share: Amounts
    """By row of `Graph.users`: what a value hands to that user."""
    rest: Amounts
    """By value: what it hands to the end of the step."""
    back: Amounts
    """By row of `Graph.before`: what the later operator hands to the earlier one."""


@dataclass(frozen=True)
class Forced:
    """`earlier` runs before `later` in every order that holds less than the flow says: it is that
    of an operator if `later` ran first."""

    earlier: int
    later: int
    flow: Flow


@dataclass(frozen=True)
class Certificate:
    """Each `forced` holds given those before it, and the last flow given all of them: so no order
    holds less than the least of the flows."""

    forced: tuple[Forced, ...]
    flow: Flow
