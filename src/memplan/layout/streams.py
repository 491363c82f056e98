"""Lifetimes for layout where a job uses several streams.

Work of two streams runs in no order unless one waited for the other. The stream with the most bytes
is the main one, and its requests live from allocation to release, as the host sees them. A request
of another stream is widened at both ends: back to the last moment of which its stream has seen all
other streams' work, and on to the first moment at which all others have seen its own work up to the
release. So does a release of memory that another stream uses (`record_stream`). Where no
dependency is recorded, the lifetime is the whole round of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.types.trace import I64, EventKind, Trace

NEVER = 1 << 60
"""The end of what is not released."""
_NEVER_SAFE = NEVER - 1
"""The end of what is released, and of which not all streams are known to have passed it."""


@dataclass(frozen=True)
class Lifetimes:
    """By storage; `begin` is -1 where it never begins, `end` is NEVER where it never ends. Moments
    are indices of events; memory may be another's before `begin` and from `end` on."""

    alloc: I64
    """The event of the allocation."""
    begin: I64
    end: I64


def lifetimes(trace: Trace, device: int) -> Lifetimes:
    """When the memory of each storage of a device is in use, for all streams."""
    events = trace.events
    here = (events.device == device) & (events.storage >= 0)
    alloc = _by_storage(trace, here & (events.kind == EventKind.ALLOC), -1)
    end = _by_storage(trace, here & (events.kind == EventKind.FREE), NEVER)
    completed = _by_storage(trace, here & (events.kind == EventKind.FREE_COMPLETED), -1)
    end = np.maximum(end, completed)
    asked = here & np.isin(events.kind, (EventKind.ALLOC, EventKind.RECORD_STREAM))
    streams = np.unique(events.stream[asked]).tolist()
    if len(streams) < 2:
        return Lifetimes(alloc, alloc.copy(), end)
    return _Widening(trace, device, streams, alloc, end, completed).run()


def _by_storage(trace: Trace, rows: np.ndarray, default: int) -> I64:
    column = np.full(len(trace.storages), default, np.int64)
    at = np.flatnonzero(rows)
    column[trace.events.storage[at]] = at
    return column


class _Widening:
    """One pass over the events. `seen[s][t]`: of the work of stream t, the moment up to which what
    runs next on stream s comes after it."""

    def __init__(
        self, trace: Trace, device: int, streams: list[int], alloc: I64, end: I64, completed: I64
    ) -> None:
        self._trace, self._device = trace, device
        self._alloc, self._end, self._completed = alloc, end, completed
        self._number = {stream: number for number, stream in enumerate(streams)}
        events = trace.events
        rows = (events.kind == EventKind.ALLOC) & (events.device == device)
        asked = np.bincount(
            np.searchsorted(streams, events.stream[rows]), events.bytes[rows], len(streams)
        )
        self._main = int(asked.argmax())
        self._seen = [[-1] * len(streams) for _ in streams]
        self._recorded: dict[int, tuple[int, list[int]]] = {}
        self._waiting: list[tuple[int, int, frozenset[int]]] = []
        """(moment of release, storage, streams that used it)."""
        self._users: dict[int, set[int]] = {}

    def run(self) -> Lifetimes:
        events = self._trace.events
        begin = self._alloc.copy()
        kinds = (EventKind.ALLOC, EventKind.FREE, EventKind.RECORD_STREAM, EventKind.EVENT_RECORD,
                 EventKind.EVENT_WAIT, EventKind.SYNCHRONIZE)  # fmt: skip
        rows = np.flatnonzero((events.device == self._device) & np.isin(events.kind, kinds))
        table = zip(
            rows.tolist(), events.kind[rows].tolist(), events.stream[rows].tolist(),
            events.storage[rows].tolist(), events.aux[rows].tolist(), strict=True,
        )  # fmt: skip
        for now, kind, stream, storage, aux in table:
            number = self._number.get(stream)
            if kind == EventKind.ALLOC:
                assert number is not None
                self._users[storage] = {number}
                if number != self._main:
                    others = [t for t in self._number.values() if t != number]
                    begin[storage] = min(now, *(self._seen[number][t] for t in others))
            elif kind == EventKind.RECORD_STREAM:
                if number is not None and storage in self._users:
                    self._users[storage].add(number)
            elif kind == EventKind.FREE:
                self._release(now, storage)
            else:
                self._order(now, kind, number, stream, aux)
        for _, storage, _ in self._waiting:
            self._end[storage] = _NEVER_SAFE
        return Lifetimes(self._alloc, begin, self._end)

    def _release(self, now: int, storage: int) -> None:
        users = self._users.pop(storage, set())
        if users - {self._main} and self._completed[storage] < 0:
            self._waiting.append((now, storage, frozenset(users)))

    def _order(self, now: int, kind: int, number: int | None, stream: int, aux: int) -> None:
        """An event that puts work in order."""
        if kind == EventKind.EVENT_RECORD:
            if number is not None:
                seen = list(self._seen[number])
                seen[number] = now
                self._recorded[aux] = (number, seen)
            return
        if kind == EventKind.EVENT_WAIT:
            if number is not None and aux in self._recorded:
                self._merge(number, self._recorded[aux][1])
        elif stream < 0:
            self._seen = [[now] * len(self._number) for _ in self._number]
        elif number is not None:
            known = list(self._seen[number])
            known[number] = now
            for other in self._number.values():
                self._merge(other, known)
        self._let_go(now)

    def _merge(self, number: int, known: list[int]) -> None:
        self._seen[number] = [max(a, b) for a, b in zip(self._seen[number], known, strict=True)]

    def _let_go(self, now: int) -> None:
        """Releases whose users' work everybody has now seen."""
        left = []
        for entry in self._waiting:
            released, storage, users = entry
            safe = all(
                self._seen[t][user] >= released
                for user in users
                for t in self._number.values()
                if t != user
            )
            if safe:
                self._end[storage] = now
            else:
                left.append(entry)
        self._waiting = left
