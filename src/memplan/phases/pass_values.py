"""The values of a pass: which operators make, read and write each, and when it is gone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memplan.phases.passes import Pass
from memplan.timing.workload import storage_bytes
from memplan.types.step_graph import Bools
from memplan.types.trace import I64, EventKind, Provenance, Trace


@dataclass(frozen=True)
class Edges:
    """Pairs of a row and a value without repetition, by row and then by value."""

    row: I64
    value: I64

    @classmethod
    def of(cls, row: I64, value: I64, values: int) -> Edges:
        key = np.unique(row * max(values, 1) + value)
        return cls(key // max(values, 1), key % max(values, 1))

    def starts(self, rows: int) -> I64:
        """CSR: row i owns `value[starts[i]:starts[i + 1]]`."""
        return np.searchsorted(self.row, np.arange(rows + 1)).astype(np.int64)

    def by_row(self, rows: I64) -> list[list[int]]:
        """The values of each of some rows."""
        starts = np.searchsorted(self.row, rows)
        stops = np.searchsorted(self.row, rows, "right")
        value = self.value.tolist()
        return [value[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]


@dataclass(frozen=True)
class PassValues:
    """Columns by value number, ordered by the storage generation's number and so, within an
    operator, by output. `bytes`, `alloc` and `free` are as in `GraphValues`."""

    storage: I64
    """The trace's number of the generation; -1 for the scratch memory of a row."""
    bytes: I64
    alloc: I64
    free: I64
    outlives: Bools
    """Whether it is still there after the pass's last event."""
    reads: Edges
    writes: Edges
    scratch_rows: I64
    """Rows in which a kernel takes memory for itself and gives it back."""

    def __len__(self) -> int:
        return len(self.bytes)

    def held_until_release(self, of: Bools) -> PassValues:
        """The same values; each in `of` is also read by the last row before its release."""
        held = np.flatnonzero(of)
        row = np.append(self.reads.row, self.free[held] - 1)
        return replace(self, reads=Edges.of(row, np.append(self.reads.value, held), len(self)))

    def unread_before(self, row: int, of: Bools) -> PassValues:
        """The same values; rows before `row` read none in `of`."""
        left = (self.reads.row >= row) | ~of[self.reads.value]
        return replace(self, reads=Edges(self.reads.row[left], self.reads.value[left]))

    def there_before(self, forward: int) -> PassValues:
        """The same values, where those that rows from `forward` on make and leave behind, such as
        gradients, exist from the beginning, as in later passes."""
        left = self.outlives & (self.alloc >= forward)
        return replace(self, alloc=np.where(left, -1, self.alloc))

    def with_scratch(self, scratch_bytes: I64) -> PassValues:
        """The same values and one more for each of `scratch_rows` that needs any bytes."""
        rows = self.scratch_rows[scratch_bytes > 0]
        added, count = len(rows), len(self)
        numbers = np.arange(count, count + added)
        return replace(
            self,
            storage=np.append(self.storage, np.full(added, -1)),
            bytes=np.append(self.bytes, scratch_bytes[scratch_bytes > 0]),
            alloc=np.append(self.alloc, rows),
            free=np.append(self.free, rows + 1),
            outlives=np.append(self.outlives, np.zeros(added, bool)),
            writes=Edges.of(
                np.append(self.writes.row, rows),
                np.append(self.writes.value, numbers),
                count + added,
            ),
        )


@dataclass(frozen=True)
class _Requests:
    """Storage generations that begin and end within a pass, each with its row."""

    made: I64
    made_row: I64
    gone: I64
    gone_row: I64
    early: Bools
    """Which of those gone are so before their row's operator makes anything."""
    scratch: I64
    scratch_rows: I64

    @classmethod
    def of(cls, trace: Trace, chosen: Pass) -> _Requests:
        within = slice(chosen.first_event, chosen.last_event)
        kind, storage = trace.events.kind[within], trace.events.storage[within]
        at = np.arange(chosen.first_event, chosen.last_event)
        begins = trace.ops.event[chosen.start : chosen.stop]
        row = np.searchsorted(begins, at, "right") - 1
        is_made, is_gone = kind == EventKind.ALLOC, kind == EventKind.FREE
        first = np.full(len(begins), -1)
        rows, positions = np.unique(row[is_made], return_index=True)
        first[rows] = at[is_made][positions]
        early = at[is_gone] < first[row[is_gone]]
        by_rule = is_made & (trace.events.provenance[within] == Provenance.RULE)
        ruled = np.stack((row[by_rule], storage[by_rule]), axis=1)
        ended = np.stack((row[is_gone], storage[is_gone]), axis=1)
        passing = np.isin(_keys(ruled), _keys(ended))
        return cls(
            made=storage[is_made],
            made_row=row[is_made],
            gone=storage[is_gone],
            gone_row=row[is_gone],
            early=early,
            scratch=ruled[passing, 1],
            scratch_rows=np.unique(ruled[passing, 0]),
        )


def _keys(rows_and_storages: I64) -> I64:
    """One number for each pair."""
    return rows_and_storages[:, 0] * (1 << 32) + rows_and_storages[:, 1]


def pass_values(trace: Trace, chosen: Pass) -> PassValues:
    """The values that operators of a pass touch, and those that begin or end within it, but for
    the scratch memory of kernels.

    An operator's row lasts until the next one begins: what is let go in between is gone at the
    start of the next row. What is let go while an operator runs and before it makes anything is
    gone at the start of its own row, unless it is one of the operator's tensors.
    """
    asked = _Requests.of(trace, chosen)
    ops, count = trace.ops, chosen.stop - chosen.start
    read_row, read = touched(ops.reads_start, ops.reads, chosen.start, chosen.stop)
    write_row, written = touched(ops.writes_start, ops.writes, chosen.start, chosen.stop)
    storage = np.setdiff1d(np.concatenate((read, written, asked.made, asked.gone)), asked.scratch)
    made, gone = ~np.isin(asked.made, asked.scratch), ~np.isin(asked.gone, asked.scratch)
    made_value = np.searchsorted(storage, asked.made[made])
    gone_value = np.searchsorted(storage, asked.gone[gone])
    values = len(storage)
    reads = Edges.of(read_row, np.searchsorted(storage, read), values)
    writes = Edges.of(
        np.append(write_row, asked.made_row[made]),
        np.append(np.searchsorted(storage, written), made_value),
        values,
    )
    size = storage_bytes(trace)[storage]
    alloc = _first_writes(size == 0, reads, writes)
    alloc[made_value] = asked.made_row[made]
    free = np.full(values, count, np.int64)
    free[gone_value] = asked.gone_row[gone] + 1
    last = _last_rows(reads, writes, values)
    early = gone_value[asked.early[gone]]
    early = early[last[early] < free[early] - 1]
    free[early] -= 1
    outlives = np.ones(values, bool)
    outlives[gone_value] = False
    return PassValues(
        storage=storage,
        bytes=np.where((alloc >= 0) | ~outlives, size, 0),
        alloc=alloc,
        free=np.maximum(free, alloc),
        outlives=outlives,
        reads=reads,
        writes=writes,
        scratch_rows=asked.scratch_rows,
    )


def touched(starts: I64, storages: I64, first: int, stop: int) -> tuple[I64, I64]:
    """Rows, from 0, and storages of operators `[first, stop)` of a CSR column."""
    bounds = starts[first : stop + 1]
    rows = np.repeat(np.arange(stop - first), np.diff(bounds))
    return rows, storages[bounds[0] : bounds[-1]]


def _first_writes(empty: Bools, reads: Edges, writes: Edges) -> I64:
    """For each value the row that makes it, if it is one of the `empty` (for which no request is
    ever made) and is written before it is read; else -1."""
    none = np.iinfo(np.int64).max
    first_read, first_write = (np.full(len(empty), none) for _ in range(2))
    np.minimum.at(first_read, reads.value, reads.row)
    np.minimum.at(first_write, writes.value, writes.row)
    return np.where(empty & (first_write < first_read), first_write, -1).astype(np.int64)


def _last_rows(reads: Edges, writes: Edges, values: int) -> I64:
    """The last row that reads or writes each value; -1 for none."""
    last = np.full(values, -1, np.int64)
    np.maximum.at(last, reads.value, reads.row)
    np.maximum.at(last, writes.value, writes.row)
    return last
