"""Builds a `Trace` row by row; the only place that knows how the columns are laid out in growth."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from memplan.types.trace import (
    EventKind,
    Events,
    HostEventKind,
    HostEvents,
    Ops,
    Phase,
    Provenance,
    Role,
    Storages,
    Trace,
    TraceMeta,
    columns_of,
)

_CODES = {"<u1": "B", "<i2": "h", "<i4": "i", "<i8": "q"}


def printable(text: str) -> str:
    """A file name that is not UTF-8 has lone surrogates in Python, which no file and no terminal
    takes: those are written as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class TraceBuilder:
    """Appends events, operators and storages, then `build()`s the columns.

    The context of an event or operator (operator, module, phase, step, source line, call) is
    whatever the public attributes hold when it is appended. Not thread-safe: callers hold the GIL
    between the reads and writes of one row anyway, and a capture appends from one thread at a
    time.
    """

    def __init__(self) -> None:
        self._strings: dict[str, int] = {"": 0}
        self._events = _growing(Events)
        self._ops = _growing(Ops)
        self._storages = _growing(Storages)
        self._host = _growing(HostEvents)
        self.op = -1
        self.module = 0
        self.phase = Phase.SETUP
        self.step = 0
        self.source = 0
        self.call = -1

    def __len__(self) -> int:
        return len(self._events["kind"])

    def intern(self, text: str) -> int:
        """The number of a string; the empty string is 0."""
        number = self._strings.get(text)
        if number is None:
            number = self._strings.setdefault(printable(text), len(self._strings))
        return number

    def strings(self) -> Iterable[tuple[str, int]]:
        """Interned strings and their numbers."""
        return self._strings.items()

    def begin_op(self, name: str, *, reads: Iterable[int] = (), stream: int = 0) -> int:
        """Start an operator; the events that follow belong to it. Returns its row."""
        ops = self._ops
        ops["name"].append(self.intern(name))
        ops["event"].append(len(self))
        ops["module"].append(self.module)
        ops["phase"].append(self.phase)
        ops["step"].append(self.step)
        ops["source"].append(self.source)
        ops["stream"].append(stream)
        ops["call"].append(self.call)
        ops["flops"].append(0)
        ops["moved_bytes"].append(-1)
        ops["operands"].append(0)
        ops["reads_start"].append(len(ops["reads"]))
        ops["reads"].extend(reads)
        ops["writes_start"].append(len(ops["writes"]))
        self.op = len(ops["name"]) - 1
        return self.op

    def op_writes(self, storages: Iterable[int]) -> None:
        """The storages that the operator begun last writes."""
        self._ops["writes"].extend(storages)

    def op_work(self, *, flops: int, moved_bytes: int, operands: str = "") -> None:
        """What the operator begun last computes and moves, and its arguments as text."""
        self._ops["flops"][-1] = flops
        self._ops["moved_bytes"][-1] = moved_bytes
        self._ops["operands"][-1] = self.intern(operands)

    def work_since(self, op: int) -> tuple[int, int]:
        """Operations, and bytes moved, of the operators from number `op` on."""
        return sum(self._ops["flops"][op:]), sum(self._ops["moved_bytes"][op:])

    def new_storage(
        self,
        *,
        role: Role = Role.UNKNOWN,
        name: str = "",
        dtype: str = "",
        shape: str = "",
    ) -> int:
        """Number of a new storage generation."""
        columns = self._storages
        columns["role"].append(role)
        columns["name"].append(self.intern(name))
        columns["dtype"].append(self.intern(dtype))
        columns["shape"].append(self.intern(shape))
        return len(columns["role"]) - 1

    @property
    def newest_storage(self) -> int:
        """Number of the last storage generation that began; -1 before the first."""
        return len(self._storages["role"]) - 1

    def new_storage_like(self, storage: int) -> int:
        """Number of a new generation of a storage, for the same tensor."""
        columns = self._storages
        for column in columns.values():
            column.append(column[storage])
        return len(columns["role"]) - 1

    def set_role(self, storage: int, role: Role, name: str = "") -> None:
        """Say what a storage is for once that is known. A gathered parameter stays one: while it is
        whole it is a parameter of its module too."""
        roles = self._storages["role"]
        if role == Role.PARAMETER and roles[storage] == Role.GATHERED_PARAMETER:
            return
        roles[storage] = role
        if name:
            self._storages["name"][storage] = self.intern(name)

    def role_of(self, storage: int) -> Role:
        return Role(self._storages["role"][storage])

    def append(
        self,
        kind: EventKind,
        storage: int = -1,
        nbytes: int = 0,
        *,
        low: int | None = None,
        high: int | None = None,
        stream: int = 0,
        device: int = 0,
        provenance: Provenance = Provenance.OBSERVED,
        aux: int = -1,
    ) -> int:
        """Append one event; returns its index. `low` and `high` default to `nbytes`."""
        events = self._events
        events["kind"].append(kind)
        events["storage"].append(storage)
        events["bytes"].append(nbytes)
        events["bytes_low"].append(nbytes if low is None else low)
        events["bytes_high"].append(nbytes if high is None else high)
        events["stream"].append(stream)
        events["device"].append(device)
        events["op"].append(self.op)
        events["module"].append(self.module)
        events["phase"].append(self.phase)
        events["step"].append(self.step)
        events["source"].append(self.source)
        events["provenance"].append(provenance)
        events["aux"].append(aux)
        return len(self) - 1

    def append_host(
        self,
        kind: HostEventKind,
        storage: int,
        nbytes: int,
        *,
        pinned: int = 0,
        role: Role = Role.UNKNOWN,
    ) -> int:
        """Append one event in the host's RAM; returns its row."""
        host = self._host
        host["kind"].append(kind)
        host["storage"].append(storage)
        host["bytes"].append(nbytes)
        host["pinned"].append(pinned)
        host["role"].append(role)
        host["event"].append(len(self))
        host["phase"].append(self.phase)
        host["step"].append(self.step)
        host["source"].append(self.source)
        return len(host["kind"]) - 1

    def set_host_role(self, row: int, role: Role) -> None:
        """Say what a host storage is for; `row` is that of its allocation."""
        self._host["role"][row] = role

    def set_host_pinned(self, row: int, pinned: int = 1) -> None:
        """The host storage whose allocation is `row` turned out to be page-locked."""
        self._host["pinned"][row] = pinned

    def nbytes(self) -> int:
        """Memory that the columns hold."""
        tables = (self._events, self._ops, self._storages, self._host)
        return sum(c.itemsize * len(c) for columns in tables for c in columns.values())

    def clear_events(self) -> None:
        """Forget every row; interned strings stay."""
        for columns in (self._events, self._ops, self._storages, self._host):
            for column in columns.values():
                del column[:]
        self.op = -1

    def requests(self, start: int, stop: int) -> bytes:
        """What events `[start, stop)` asked of the allocator: equal bytes, equal requests."""
        columns = (self._events[name][start:stop] for name in ("kind", "bytes", "stream", "device"))
        return b"".join(column.tobytes() for column in columns)

    def requests_of_step(self, start: int, stop: int) -> bytes:
        """The same, whatever the order of releases: threads of the autograd engine let go of a
        pass when they come to it."""
        names = ("kind", "bytes", "stream", "device")
        rows = np.array([self._events[name][start:stop] for name in names], np.int64)
        gone = rows[0] == EventKind.FREE
        released = rows[:, gone][:, np.lexsort(rows[:, gone])]
        return rows[:, ~gone].tobytes() + released.tobytes()

    def allocations(self, start: int, stop: int, *, gone_by: int | None = None) -> bytes:
        """What events `[start, stop)` allocated, in order; with `gone_by` only what was let go
        again before that event. Equal bytes, equal allocations."""
        columns = {
            name: np.array(self._events[name][start:stop], np.int64)
            for name in ("kind", "storage", "bytes", "stream", "device")
        }
        counts = columns["kind"] == EventKind.ALLOC
        if gone_by is not None:
            kind = np.array(self._events["kind"][start:gone_by])
            storage = np.array(self._events["storage"][start:gone_by])
            counts &= np.isin(columns["storage"], storage[kind == EventKind.FREE])
        return b"".join(columns[name][counts].tobytes() for name in ("bytes", "stream", "device"))

    @property
    def ops(self) -> int:
        """Operators so far."""
        return len(self._ops["name"])

    def updated_by_hand(self, first: int, *, in_place: bool) -> int | None:
        """Among the operators since `first`, with which a backward pass begins: the one after an
        update of weights; None where there was none. A forward pass reads something that was
        computed from what the backward pass wrote; or, `in_place`, that was written over what is
        older than the backward pass. What the host computes from gradients cannot be followed:
        weights that are copied from there are an update."""
        columns, ops = self._ops, self.ops
        copies = {self.intern("aten.copy_.default"), self.intern("aten._to_copy.default")}
        oldest, from_gradients, from_host = -1, set[int](), set[int]()
        after, updated = first, False
        for op in range(first, ops):
            phase = columns["phase"][op]
            reads, writes = self._row("reads", op), self._row("writes", op)
            if phase == Phase.BACKWARD:
                from_gradients.update(writes)
                after = op + 1
                continue
            if oldest < 0:  # the backward pass is over
                oldest = min((number for number in from_gradients if number >= 0), default=0)
            if columns["name"][op] in copies and from_host.issuperset(set(reads) - set(writes)):
                weights = (n >= 0 and self.role_of(n) == Role.PARAMETER for n in writes)
                if from_gradients and any(weights):
                    updated, after = True, op + 1
                from_host.update(writes)
            if not from_gradients.intersection(reads):
                continue
            within = columns["call"][op] >= 0  # a module
            if within and phase == Phase.FORWARD:
                return after
            if in_place and any(0 <= number < oldest for number in writes):
                updated, after = True, op + 1
            elif not (in_place or within):
                after = op + 1
            from_gradients.update(writes)
        return after if updated else None

    def begin_step(self, step: int, op: int) -> int:
        """Operator `op` and all that came since belong to this step, and so does what follows.
        Returns the first event of the step."""
        self.step = step
        event = self._ops["event"][op] if op < self.ops else len(self)
        for table, row in (
            (self._ops, op),
            (self._events, event),
            (self._host, bisect_left(self._host["event"], event)),
        ):
            column = table["step"]
            column[row:] = array(column.typecode, [step]) * (len(column) - row)
        return event

    def _row(self, name: str, op: int) -> array[int]:
        starts, numbers = self._ops[f"{name}_start"], self._ops[name]
        stop = starts[op + 1] if op + 1 < self.ops else len(numbers)
        return numbers[starts[op] : stop]

    def only_made_new(self, start: int, op: int, newest: int) -> bool:
        """Whether all that happened since event `start` and operator `op` was to allocate storages
        newer than `newest`, to write these and to let go of some."""
        kind = np.array(self._events["kind"][start:])
        storage = np.array(self._events["storage"][start:], np.int64)
        first = self._ops["writes_start"][op] if op < self.ops else len(self._ops["writes"])
        written = np.array(self._ops["writes"][first:], np.int64)
        return bool(
            np.all((kind == EventKind.ALLOC) | (kind == EventKind.FREE))
            and np.all(storage > newest)
            and np.all((written < 0) | (written > newest))
        )

    def build(self, meta: TraceMeta) -> Trace:
        """The finished trace. The builder can go on; columns are copied."""
        ops = {name: _column(column) for name, column in self._ops.items()}
        ops["reads_start"] = np.append(ops["reads_start"], len(self._ops["reads"]))
        ops["writes_start"] = np.append(ops["writes_start"], len(self._ops["writes"]))
        return Trace(
            meta=meta,
            strings=list(self._strings),
            events=Events(**{name: _column(column) for name, column in self._events.items()}),
            ops=Ops(**ops),
            storages=Storages(**{name: _column(column) for name, column in self._storages.items()}),
            host=HostEvents(**{name: _column(column) for name, column in self._host.items()}),
        )


def _growing(table: type) -> dict[str, array[int]]:
    return {name: array(_CODES[dtype]) for name, dtype in columns_of(table)}


_DTYPES = {"B": np.uint8, "h": np.int16, "i": np.int32, "q": np.int64}


def _column(values: array) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(values, dtype=_DTYPES[values.typecode])
