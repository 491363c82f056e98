"""Lifetimes for a layout where a job uses several streams.

Work of two streams runs in any order unless one waits for the other. So a request may reuse memory
that another stream released only if its own stream waits for the work before that release. To
express this by lifetimes alone, they are extended. Of each two streams, call the one that asks for
fewer bytes the smaller one; its lifetimes are extended in two ways:

- Memory that the smaller stream uses, by its own request or by `record_stream`, lives on after its
  release, until the larger stream has waited for the smaller stream's work up to the release. (Only
  requests and uses of memory are known as work; a trace has no other.)
- Memory that the smaller stream requests is alive already from the last moment up to which it has
  waited for the larger stream's work, if the larger stream has released memory since.

Where no wait is recorded, the lifetime is the whole round of the plan. None of this is needed for
safety: a running job waits before it reuses memory of another stream (`native/planned`). Extended
lifetimes keep these waits short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.types.trace import I64, EventKind, Trace

NEVER = 1 << 60
"""The end of memory that is not released."""
_NEVER_SAFE = NEVER - 1
"""The end of memory that is released, but for which some stream never waited."""


@dataclass(frozen=True)
class Lifetimes:
    """Lifetimes `[begin, end)`, a row for each storage. `begin` is -1 where it never begins, `end`
    is NEVER where it never ends. Moments are indices of events."""

    alloc: I64
    """The event of the allocation."""
    begin: I64
    end: I64


def lifetimes(trace: Trace, device: int) -> Lifetimes:
    """The lifetimes of all storages of a device, extended for its streams."""
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
    """One pass over the events. `seen[s][t]`: the moment up to which s waited for t's work."""

    def __init__(
        self, trace: Trace, device: int, streams: list[int], alloc: I64, end: I64, completed: I64
    ) -> None:
        self._trace, self._device = trace, device
        self._alloc, self._end, self._completed = alloc, end, completed
        events = trace.events
        rows = (events.kind == EventKind.ALLOC) & (events.device == device)
        asked = {one: int(events.bytes[rows & (events.stream == one)].sum()) for one in streams}
        streams = sorted(streams, key=lambda one: -asked[one])
        self._takers = len(streams)
        ordered = np.isin(events.kind, (EventKind.EVENT_RECORD, EventKind.EVENT_WAIT))
        seen = np.unique(events.stream[ordered & (events.device == device)]).tolist()
        # The largest first, then streams without requests, through which others may wait.
        streams = [*streams, *(stream for stream in seen if stream not in streams)]
        self._number = {stream: number for number, stream in enumerate(streams)}
        self._seen = [[-1] * len(streams) for _ in streams]
        self._worked = [-1] * len(streams)
        """The last moment at which the stream requested memory, or used another stream's."""
        self._released = [-1] * len(streams)
        """The value of `_worked` when memory that the stream uses was last released."""
        self._recorded: dict[int, tuple[int, list[int]]] = {}
        self._waiting: list[tuple[int, dict[int, int]]] = []
        """Released storages, with the moments, by stream, up to which larger ones have to wait."""
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
                self._worked[number] = now
                begin[storage] = self._begin(number, now)
            elif kind == EventKind.RECORD_STREAM:
                if number is not None and storage in self._users:
                    self._users[storage].add(number)
                    self._worked[number] = now
            elif kind == EventKind.FREE:
                self._release(now, storage)
            else:
                self._order(now, kind, number, stream, aux)
        for storage, _ in self._waiting:
            self._end[storage] = _NEVER_SAFE
        return Lifetimes(self._alloc, begin, self._end)

    def _begin(self, number: int, now: int) -> int:
        seen = self._seen[number]
        return min([now, *(seen[t] for t in range(number) if self._released[t] > seen[t])])

    def _release(self, now: int, storage: int) -> None:
        users = self._users.pop(storage, set())
        if self._completed[storage] >= 0:
            return
        for user in users:
            self._released[user] = self._worked[user]
        if max(users, default=0):
            self._waiting.append((storage, {user: self._worked[user] for user in users}))
            self._let_go(now)

    def _order(self, now: int, kind: int, number: int | None, stream: int, aux: int) -> None:
        """Follow an event that orders work of streams."""
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
        """End the lifetimes of storages for whose users all larger streams have now waited."""
        left = []
        for storage, worked in self._waiting:
            larger = ((user, t) for user in worked for t in range(min(user, self._takers)))
            if all(self._seen[t][user] >= worked[user] for user, t in larger):
                self._end[storage] = now
            else:
                left.append((storage, worked))
        self._waiting = left
