"""When a job is planned, and what its memory did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from memplan.runtime.planned.library import Library
from memplan.runtime.planned.recording import MOST_EVENTS
from memplan.types.run_outcome import PlanSwitch
from memplan.types.trace import Trace


@dataclass(frozen=True)
class Policy:
    """When a job is planned."""

    most_steps: int = 8
    """Recorded at most, where no step repeats the one before."""
    planning_seconds: float = 20.0
    """Assumed cost of planning until it is measured: the time that the planner may search."""
    most_events: int = MOST_EVENTS


@dataclass
class Account:
    """What the job's memory did, for the outcome."""

    steps: int = 0
    switches: list[PlanSwitch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hook_nanoseconds: int = 0
    """Spent in hooks' own work, planning and its beginning and end excepted."""
    planning_seconds: float = 0.0
    """Time from the ends of recordings until their plans were in effect."""
    step_seconds_before: float | None = None
    """Time of the shortest step before a plan was in effect, without hooks."""
    trace: Trace | None = None
    """A trace of the first steps."""


class Served(NamedTuple):
    """Requests that a plan foresaw, and all, of the phases that it knows."""

    placed: int
    all: int

    @property
    def rate(self) -> float:
        return self.placed / self.all if self.all else 1.0

    def __sub__(self, other: object) -> Served:
        assert isinstance(other, Served)
        return Served(self.placed - other.placed, self.all - other.all)


class HitRate:
    """Which part of a job's requests a plan foresaw. Counts from its construction on; not while the
    job does what the plan does not know."""

    def __init__(self, library: Library, devices: list[int]) -> None:
        self._library = library
        self._devices = devices
        self._begin = self._counted()
        self._window = Served(0, 0)
        self._left: Served | None = None

    def leave(self) -> None:
        """The job begins what the plan does not know."""
        if self._left is None:
            self._left = self._counted()

    def come_back(self) -> None:
        if self._left is not None:
            self._begin = _sum(self._begin, self._counted() - self._left)
            self._left = None

    def total(self) -> Served:
        now = self._left if self._left is not None else self._counted()
        return now - self._begin

    def window(self) -> Served:
        """Since the last call."""
        total = self.total()
        since, self._window = total - self._window, total
        return since

    def _counted(self) -> Served:
        placed = unplaced = 0
        for device in self._devices:
            found = self._library.statistics(device)
            if found is not None:
                placed += found.hits + found.dynamic
                unplaced += found.adopted + found.misses
        return Served(placed, placed + unplaced)


def _sum(one: Served, other: Served) -> Served:
    return Served(one.placed + other.placed, one.all + other.all)
