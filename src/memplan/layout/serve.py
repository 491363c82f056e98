"""What a plan serves of a trace: the rule of the planned allocator, event by event, in Python.

A request that is the next one of the plan gets its planned place, if no other request is there. A
dynamic one takes the smallest gap that holds it in its reusable space. Where requests differ from
the plan the place in it is found again from a few requests in a row, so that one request more or
less costs that request alone. All others go to PyTorch's allocator. An address is never in use
twice, whatever the plan says.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from memplan.layout.dynamic import Bools
from memplan.layout.streams import lifetimes
from memplan.types.allocation import ROUNDING, Requests, rounded
from memplan.types.plan import AllocationPart
from memplan.types.trace import I32, I64, EventKind, Trace

_AGREE = 4
"""Equal requests in a row that tell the place in the plan."""
_AHEAD = 256
"""Requests of the plan that may have been left out."""
_LOST = 32
"""Unplanned requests in a row after which the place is looked for in the whole plan."""


@dataclass(frozen=True)
class Served:
    """By storage of the trace."""

    offset: I64
    """Where in the arena it was put; -1 for what PyTorch's allocator serves."""
    planned: int
    """Requests that got their planned place."""
    dynamic: int
    """Requests that were put into a reusable space."""
    missed: int
    """Requests left to PyTorch's allocator."""


def serve(trace: Trace, part: AllocationPart, requests: Requests) -> Served:
    """Run the requests of a trace through a plan."""
    events = trace.events
    place = _Place(part, requests)
    arena = _Arena(part)
    offset = np.full(len(trace.storages), -1, np.int64)
    asked = (events.kind == EventKind.ALLOC) & (events.bytes > 0)
    asked = np.flatnonzero(asked & (events.device == part.device))
    stream = {int(row): number for number, row in enumerate(asked.tolist())}
    found = place.follow(events.bytes[asked], events.stream[asked])
    ends = lifetimes(trace, part.device).end
    counts = [0, 0, 0]
    due: dict[int, list[int]] = {}
    for row in range(len(trace)):
        for storage in due.pop(row, ()):
            arena.release(int(offset[storage]))
        if row not in stream:
            continue
        request, storage = found[stream[row]], int(events.storage[row])
        nbytes = -(-int(events.bytes[row]) // ROUNDING) * ROUNDING
        got, how = -1, 2
        if request >= 0 and requests.offset[request] >= 0:
            got, how = arena.at(int(requests.offset[request]), nbytes), 0
        elif request >= 0 and requests.space[request] >= 0:
            got, how = arena.within(int(requests.space[request]), nbytes), 1
        counts[how if got >= 0 else 2] += 1
        offset[storage] = got
        if got >= 0:
            due.setdefault(int(ends[storage]), []).append(storage)
    return Served(offset, *counts)


class _Place:
    """Finds for each request of a job the request of the plan that it is, or -1."""

    def __init__(self, part: AllocationPart, requests: Requests) -> None:
        self._bytes: list[int] = requests.bytes.tolist()
        self._stream: list[int] = requests.stream.tolist()
        self._dynamic: list[bool] = (requests.space >= 0).tolist()
        self._count = len(requests)
        self._round = self._count - part.prologue
        self._runs: dict[tuple[int, ...], list[int]] = {}
        for at in range(self._count):
            self._runs.setdefault(self._run(at), []).append(at)

    def _run(self, at: int) -> tuple[int, ...]:
        return tuple(self._bytes[self._at(at + shift)] for shift in range(2 * _AGREE))

    def _at(self, place: int) -> int:
        """After the last request the round's first follows."""
        while place >= self._count:
            place -= self._round
        return place

    def follow(self, nbytes: I64, stream: I32) -> list[int]:
        sizes, streams = nbytes.tolist(), stream.tolist()
        found: list[int] = []
        next_, lost = 0, 0
        for at in range(len(sizes)):
            if lost and lost % _LOST == 0:
                places = self._runs.get(tuple(sizes[at : at + 2 * _AGREE]), ())
                next_ = min(places, key=lambda p: (p - next_) % self._count, default=next_)
            step = self._step(next_, sizes, streams, at)
            if step is None:
                found.append(-1)
                lost += 1
                continue
            found.append(self._at(next_ + step))
            next_, lost = self._at(next_ + step + 1), 0
        return found

    def _step(self, next_: int, sizes: list[int], streams: list[int], at: int) -> int | None:
        """How many requests of the plan are left out before the one that request `at` is."""
        if self._dynamic[next_] or self._equal(next_, sizes[at], streams[at]):
            return 0
        for ahead in range(1, min(_AHEAD, self._round)):
            if self._agrees(next_ + ahead, sizes, streams, at):
                return ahead
        return None

    def _agrees(self, place: int, sizes: list[int], streams: list[int], at: int) -> bool:
        """Whether the plan from `place` on is what comes; dynamic ones may differ."""
        if not self._equal(self._at(place), sizes[at], streams[at]):
            return False
        for shift in range(1, min(_AGREE, len(sizes) - at)):
            which = self._at(place + shift)
            if not self._dynamic[which] and self._bytes[which] != sizes[at + shift]:
                return False
        return True

    def _equal(self, place: int, nbytes: int, stream: int) -> bool:
        return self._bytes[place] == nbytes and self._stream[place] == stream


class _Arena:
    """What is in use, by offset."""

    def __init__(self, part: AllocationPart) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._spaces = [space.ranges for space in part.spaces]

    def at(self, offset: int, nbytes: int) -> int:
        """Take a place, if it is free; else -1."""
        where = bisect_left(self._starts, offset)
        if where < len(self._starts) and self._starts[where] < offset + nbytes:
            return -1
        if where and self._ends[where - 1] > offset:
            return -1
        self._starts.insert(where, offset)
        self._ends.insert(where, offset + nbytes)
        return offset

    def within(self, space: int, nbytes: int) -> int:
        """Take the smallest gap of a space that holds so much; else -1."""
        best, place = 1 << 62, -1
        for lower, upper in self._spaces[space]:
            where = max(bisect_left(self._starts, lower) - 1, 0)
            while lower < upper:
                if where < len(self._starts) and self._ends[where] <= lower:
                    where += 1
                    continue
                until = min(self._starts[where], upper) if where < len(self._starts) else upper
                if nbytes <= until - lower < best:
                    best, place = until - lower, lower
                if until >= upper:
                    break
                lower = self._ends[where]
        return self.at(place, nbytes) if place >= 0 else -1

    def release(self, offset: int) -> None:
        where = bisect_left(self._starts, offset)
        del self._starts[where], self._ends[where]


def served_bytes(trace: Trace, served: Served) -> I64:
    """By event: bytes of the arena in use after it, rounded."""
    events = trace.events
    sizes = np.zeros(len(trace.storages), np.int64)
    asked = np.flatnonzero(events.kind == EventKind.ALLOC)
    sizes[events.storage[asked]] = rounded(events.bytes[asked])
    mine: Bools = served.offset >= 0
    sign = np.where(events.kind == EventKind.ALLOC, 1, 0) - (events.kind == EventKind.FREE)
    change = np.where((events.storage >= 0) & mine[events.storage], sign * sizes[events.storage], 0)
    return np.cumsum(change)
