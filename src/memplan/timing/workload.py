"""The kernels of a trace's operators in columns: each different operator is looked at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.timing.classes import Kernel, kernels
from memplan.types.step_graph import F64
from memplan.types.trace import I64, EventKind, Trace


@dataclass(frozen=True)
class Workload:
    """Different kernels, and which operators run them. Operators that differ in nothing that time
    depends on share their kernels."""

    kind: list[str]
    flops: F64
    nbytes: F64
    rate: list[str]
    first: I64
    """The kernels of the i-th different operator are `[first[i], first[i + 1])`."""
    which: I64
    """For each operator, its number among the different ones."""


def workload(trace: Trace, sms: int, start: int = 0, stop: int | None = None) -> Workload:
    """The workload of the operators `[start, stop)`, on a card with `sms` multiprocessors."""
    ops = trace.ops
    rows = slice(start, len(ops) if stop is None else stop)
    moved = ops.moved_bytes[rows]
    if (moved < 0).any():
        moved = np.where(moved < 0, whole_storages(trace)[rows], moved)
    columns = np.stack(
        (ops.name[rows], ops.operands[rows], ops.flops[rows], moved, _dtypes(trace)[rows]), axis=1
    )
    different, which = np.unique(columns, axis=0, return_inverse=True)
    strings = trace.strings
    found: list[Kernel] = []
    first = [0]
    for name, text, flops, nbytes, dtype in different.tolist():
        found += kernels(strings[name], strings[text], flops, nbytes, sms, strings[dtype])
        first.append(len(found))
    return Workload(
        kind=[one.kind for one in found],
        flops=np.array([one.flops for one in found], np.float64),
        nbytes=np.array([one.nbytes for one in found], np.float64),
        rate=[one.rate for one in found],
        first=np.array(first, np.int64),
        which=which.reshape(-1).astype(np.int64),
    )


def _dtypes(trace: Trace) -> npt.NDArray[np.int32]:
    """The dtype of the first storage that an operator without noted arguments reads."""
    ops = trace.ops
    if not len(ops.reads):
        return np.zeros(len(ops), np.int32)
    first = ops.reads[np.minimum(ops.reads_start[:-1], len(ops.reads) - 1)]
    known = (ops.reads_start[1:] > ops.reads_start[:-1]) & (ops.operands == 0)
    return np.where(known, trace.storages.dtype[first], 0).astype(np.int32)


def whole_storages(trace: Trace) -> I64:
    """Bytes of all storages that each operator reads and writes."""
    size = storage_bytes(trace)
    ops = trace.ops
    return _row_sums(size[ops.reads], ops.reads_start) + _row_sums(
        size[ops.writes], ops.writes_start
    )


def storage_bytes(trace: Trace) -> I64:
    """Requested bytes of every storage generation; 0 for one that no request was made for."""
    events = trace.events
    size = np.zeros(len(trace.storages), np.int64)
    made = events.kind == EventKind.ALLOC
    size[events.storage[made]] = events.bytes[made]
    return size


def _row_sums(values: I64, starts: npt.NDArray[np.int64]) -> I64:
    total = np.concatenate(([0], np.cumsum(values)))
    return np.asarray(total[starts[1:]] - total[starts[:-1]], np.int64)
