"""What a job really asked of its devices, as a `Trace`.

The library keeps the requests; marks among them say which phase, module and step they belong to.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from memplan import __version__
from memplan.runtime.planned.library import EVENT, PHASE_EVENT, Table
from memplan.types.builder import TraceBuilder
from memplan.types.trace import (
    I64,
    EventKind,
    Events,
    Phase,
    Provenance,
    Storages,
    Trace,
    TraceMeta,
)

MOST_EVENTS = 4_000_000
"""The most events of one device and recording; 160 MB."""


class Source(Protocol):
    """The part of the library that records."""

    def record(self, device: int, most: int) -> None: ...

    def stop_recording(self, device: int) -> None: ...

    def take_events(self, device: int) -> tuple[Table, int]: ...

    def mark(self, device: int, number: int) -> None: ...

    def mark_stream(self, device: int, number: int, stream: int) -> None: ...


class Context(NamedTuple):
    """A position in the job."""

    phase: Phase
    module: str
    step: int


class Order(NamedTuple):
    """Work is ordered: a stream records an event or waits for one, or the host waits."""

    kind: EventKind
    event: int
    """Number of the event; -1 for none."""
    all_streams: bool


class Recording:
    """Records the requests of some devices from its construction until `stop`."""

    def __init__(self, source: Source, devices: list[int], most: int = MOST_EVENTS) -> None:
        self._source = source
        self._devices = devices
        self._most = most
        self._marks: list[Context | Order] = []
        self._contexts: dict[tuple[int, str], int] = {}
        """Marks of this step's contexts; plain integers, for an enumeration's hash is slow."""
        self._pieces: dict[int, list[Table]] = {device: [] for device in devices}
        self._context = -1
        self._kept = 0
        self._running = True
        self.steps = 0
        """Complete steps recorded."""
        self.lost = 0
        """Events that there was no room for."""
        self._edges: list[int] = []
        for device in devices:
            source.record(device, most)

    @property
    def full(self) -> bool:
        """Whether there is no room for more."""
        return self.lost > 0 or self._kept >= self._most

    def mark(self, phase: Phase, module: str) -> None:
        """What follows belongs to this phase and module."""
        key = int(phase), module
        number = self._contexts.get(key, -1)
        if number < 0:
            number = self._contexts[key] = self._new_mark(Context(phase, module, self.steps))
        if number != self._context:
            self._context = number
            for device in self._devices:
                self._source.mark(device, number)

    def _new_mark(self, mark: Context | Order) -> int:
        self._marks.append(mark)
        return len(self._marks) - 1

    def order(
        self, kind: EventKind, device: int, stream: int | None = None, event: int = -1
    ) -> None:
        """Work of a device is put in order: EVENT_RECORD, EVENT_WAIT, SYNCHRONIZE. `stream`: CUDA's
        handle; None: all."""
        number = self._new_mark(Order(kind, event, stream is None))
        if device not in self._devices:
            return
        if stream is None:
            self._source.mark(device, number)
        else:
            self._source.mark_stream(device, number, stream)

    def stepped(self) -> None:
        """A step is complete; `mark` follows."""
        self.steps += 1
        self._contexts.clear()
        self._take()
        self._edges.append(len(self._pieces[self._devices[0]]))

    def repeats(self) -> bool:
        """Whether the last complete step made the requests of the one before it."""
        if len(self._edges) < 2:
            return False
        begin = self._edges[-3] if len(self._edges) > 2 else 0
        pairs = [
            (pieces[begin : self._edges[-2]], pieces[self._edges[-2] : self._edges[-1]])
            for pieces in self._pieces.values()
        ]
        return all(_requests(before) == _requests(last) for before, last in pairs)

    def stop(self) -> None:
        """Record no more."""
        if self._running:
            self._running = False
            self._take()
            for device in self._devices:
                self._source.stop_recording(device)

    def _take(self) -> None:
        for device in self._devices:
            table, lost = self._source.take_events(device)
            self.lost = max(self.lost, lost)
            self._pieces[device].append(table)
            self._kept += len(table)

    def trace(self, meta: TraceMeta) -> Trace:
        """What was recorded so far, all devices in the order of time."""
        tables = {device: np.concatenate(pieces) for device, pieces in self._pieces.items()}
        return _as_trace(tables, self._marks, self.steps, meta)


def observed_meta(command: list[str], torch_version: str, gpu: str, conf: str) -> TraceMeta:
    """The origin of a recording."""
    return TraceMeta(
        memplan_version=__version__,
        torch_version=str(torch_version),
        origin="recording",
        method="observed",
        gpu=gpu,
        command=command,
        alloc_conf=conf,
    )


def _requests(pieces: list[Table]) -> bytes:
    """Equal bytes, equal requests."""
    if not pieces:
        return b""
    table = np.concatenate(pieces)
    asked = table[table["kind"] == EventKind.ALLOC]
    same: bytes = asked["bytes"].tobytes() + asked["stream"].tobytes()
    return same


def _as_trace(
    tables: dict[int, Table], marks: list[Context | Order], steps: int, meta: TraceMeta
) -> Trace:
    """Marks become the phase, module and step of the events behind them, and the order of
    streams."""
    start = Context(Phase.SETUP, "", 0)
    known = [start, *(mark if isinstance(mark, Context) else start for mark in marks)]
    device = np.concatenate([np.full(len(table), d, np.int16) for d, table in tables.items()])
    where = np.concatenate([_contexts_of(table, marks) for table in tables.values()])
    rows = np.concatenate([np.zeros(0, EVENT), *tables.values()])
    rows, aux, keep = _with_order(rows, marks)
    rows, device, where, aux = rows[keep], device[keep], where[keep], aux[keep]
    order = np.argsort(rows["nanoseconds"], kind="stable")
    rows, device, where, aux = rows[order], device[order], where[order], aux[order]
    storage, storages = _storage_numbers(rows, device)
    strings = [""]
    number = {"": 0}
    for context in known:
        if context.module not in number:
            number[context.module] = len(strings)
            strings.append(context.module)
    module = np.array([number[context.module] for context in known], np.int32)
    phase = np.array([context.phase for context in known], np.uint8)
    step = np.array([context.step for context in known], np.int32)
    # A last row, so that a step that ends with the recording is seen to be complete.
    count = len(rows) + 1
    zero, none = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    last = Phase.OTHER
    events = Events(
        kind=np.append(rows["kind"], EventKind.MARK).astype(np.uint8),
        storage=np.append(storage, -1),
        bytes=np.append(rows["bytes"], 0),
        bytes_low=np.append(rows["bytes"], 0),
        bytes_high=np.append(rows["bytes"], 0),
        stream=np.append(rows["stream"], 0).astype(np.int32),
        device=np.append(device, next(iter(tables))).astype(np.int16),
        op=none,
        module=np.append(module[where], 0).astype(np.int32),
        phase=np.append(phase[where], last).astype(np.uint8),
        step=np.append(step[where], steps).astype(np.int32),
        source=zero.astype(np.int32),
        provenance=np.full(count, Provenance.OBSERVED, np.uint8),
        aux=np.append(aux, -1),
    )
    meta.optimizer_steps = steps
    return Trace(meta, strings, events, TraceBuilder().build(meta).ops, _plain_storages(storages))


def _contexts_of(table: Table, marks: list[Context | Order]) -> I64:
    """For each event, one more than the index of its context; 0 before the first."""
    contexts = np.array([isinstance(mark, Context) for mark in marks], np.bool_)
    number = table["bytes"]
    marked = table["kind"] == PHASE_EVENT
    marked[marked] = contexts[number[marked]]
    latest = np.maximum.accumulate(np.where(marked, np.arange(len(table)), -1))
    found: I64 = np.where(latest >= 0, number[latest] + 1, 0)
    return found


def _with_order(
    rows: Table, marks: list[Context | Order]
) -> tuple[Table, I64, npt.NDArray[np.bool_]]:
    """The rows with marks of order as events of their kind; by row its `aux`; and which rows stay:
    not the marks of contexts, nor what a stream did that has no requests."""
    rows = rows.copy()
    aux = np.full(len(rows), -1, np.int64)
    keep = np.ones(len(rows), np.bool_)
    for row in np.flatnonzero(rows["kind"] == PHASE_EVENT).tolist():
        mark = marks[int(rows["bytes"][row])]
        if isinstance(mark, Context) or (rows["stream"][row] < 0 and not mark.all_streams):
            keep[row] = False
            continue
        rows["kind"][row], rows["bytes"][row], aux[row] = mark.kind, 0, mark.event
        if mark.all_streams:
            rows["stream"][row] = -1
    return rows, aux, keep


def _storage_numbers(rows: Table, device: np.ndarray) -> tuple[I64, int]:
    """The devices count their requests each for itself: numbers over all of them. What is released
    and was never seen to be asked for gets none."""
    key = rows["storage"].astype(np.int64) * 4096 + device
    named = rows["storage"] >= 0
    begun = np.unique(key[named & (rows["kind"] == EventKind.ALLOC)])
    at = np.searchsorted(begun, key)
    at = np.minimum(at, max(len(begun) - 1, 0))
    found = named & (len(begun) > 0)
    if len(begun):
        found &= begun[at] == key
    return np.where(found, at, -1), len(begun)


def _plain_storages(count: int) -> Storages:
    text = np.zeros(count, np.int32)
    return Storages(role=np.zeros(count, np.uint8), name=text, dtype=text, shape=text)
