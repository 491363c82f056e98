"""Which part of a job's requests a plan foresaw."""

from __future__ import annotations

from typing import NamedTuple

from memplan.runtime.planned.library import Library


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
    """Counts from its construction on; not while the job does what the plan does not know."""

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
        """So far."""
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
