"""What a solver returns: never None, always with the bound it proved; `best` is what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Solved(Generic[T]):
    """A solution that meets every constraint."""

    solution: T
    cost: float
    """Cost of the solution, in the solver's unit (bytes or seconds)."""
    bound: float
    """No solution costs less. Equal to `cost` when the solution is proved optimal."""

    @property
    def best(self) -> T:
        return self.solution


@dataclass(frozen=True)
class Infeasible:
    """Proved: there is no solution."""

    reason: str
    witness: float
    """The least budget with which there is one, as far as known, in the solver's unit."""
    best: ClassVar[None] = None
    rows: tuple[int, ...] = ()
    """Rows of the problem that alone have no solution, where the solver names some."""


@dataclass(frozen=True)
class TimedOut(Generic[T]):
    """Out of time. `best` is None when nothing was found; `bound` is still proved."""

    best: T | None
    bound: float
    cost: float = float("inf")


Solution: TypeAlias = Solved[T] | Infeasible | TimedOut[T]
