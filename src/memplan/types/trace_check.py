"""The invariants of a `Trace`, checked in bulk. Run on everything that comes from a file."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from memplan.types.errors import FormatError
from memplan.types.trace import EventKind, HostEventKind, Phase, Provenance, Role, Trace, TraceMeta

MAX_BYTES = 1 << 48
"""Largest size that any request, block or segment may have."""
MAX_FLOPS = 1 << 62
MAX_MOVED_BYTES = 1 << 58
"""The most bytes that one operator may move, far beyond what a device can."""
_MOST_STEPS = 1 << 24
MAX_ADDRESS = (1 << 63) - 1

_Column = npt.NDArray[np.integer]


def check_trace(trace: Trace, where: str) -> None:
    """Raise FormatError, naming `where` and the column, unless every number of the trace is in
    range: enumerations, string, operator and storage indices, sizes, and the row starts of the
    operators' reads and writes."""
    if not trace.strings or trace.strings[0] != "":
        raise _error(where, "the string table does not begin with the empty string")
    _check_events(trace, where)
    _check_ops(trace, where)
    strings = len(trace.strings)
    storages = trace.storages
    _within(where, "storages.role", storages.role, 0, max(Role) + 1)
    for name in ("name", "dtype", "shape"):
        _within(where, f"storages.{name}", getattr(storages, name), 0, strings)
    _check_segments(trace.meta, len(storages), where)
    steady = trace.meta.steady_steps
    if steady and (len(steady) != 2 or not 0 < steady[0] < steady[1] <= _MOST_STEPS):
        raise _error(where, "its steady steps are no range of steps")
    _check_host(trace, where)
    _check_batches(trace.meta, where)
    _check_engines(trace, where)


def _check_engines(trace: Trace, where: str) -> None:
    for stage in trace.meta.stages:
        if not 0 <= stage.begin <= stage.end <= len(trace):
            raise _error(where, "a stage lies outside of its events")
    for engine in trace.meta.engines:
        sizes = (*msgspec.structs.astuple(engine.activations),
                 *msgspec.structs.astuple(engine.graphs), engine.weight_bytes)  # fmt: skip
        sane = all(0 <= size < MAX_BYTES for size in sizes) and 0 < engine.share <= 1
        blocks = 0 < engine.block_bytes < MAX_BYTES and 0 < engine.least_blocks < 1 << 40
        blocks = blocks and 0 < engine.layers < 1 << 20
        card = 0 < engine.card_bytes < MAX_BYTES and 0 <= engine.begin <= len(trace)
        if not (sane and blocks and card):
            raise _error(where, f"what it says of the engine {engine.name!r} is out of range")


def _check_batches(meta: TraceMeta, where: str) -> None:
    for run in meta.batches:
        count = len(run.bytes)
        sane = all(0 <= size < MAX_BYTES for size in run.bytes) and run.each > 0 < run.units_each
        known = all(0 <= number < count for number in (*run.before, *run.others))
        if not sane or not known or any(len(column) != count for column in run.dims):
            raise _error(where, "what it says of a data loader's batches is out of range")


def _check_host(trace: Trace, where: str) -> None:
    host = trace.host
    bounds = {
        "kind": (0, max(HostEventKind) + 1),
        "storage": (-1, max(len(host), 1)),
        "bytes": (0, MAX_BYTES),
        "pinned": (0, 3),
        "role": (0, max(Role) + 1),
        "event": (0, len(trace.events) + 1),
        "phase": (0, max(Phase) + 1),
        "step": (0, 1 << 31),
        "source": (0, len(trace.strings)),
    }
    for name, (low, high) in bounds.items():
        _within(where, f"host.{name}", getattr(host, name), low, high)
    about = trace.meta.host
    if about is not None and not (
        0 <= about.growth_peak_bytes < MAX_BYTES and 0 < about.local_processes < 1 << 20
    ):
        raise _error(where, "what it says of the host's memory is out of range")


def _check_events(trace: Trace, where: str) -> None:
    events, strings = trace.events, len(trace.strings)
    bounds = {
        "kind": (0, max(EventKind) + 1),
        "storage": (-1, len(trace.storages)),
        "bytes": (0, MAX_BYTES),
        "bytes_low": (0, MAX_BYTES),
        "bytes_high": (0, MAX_BYTES),
        "stream": (-1, 1 << 31),
        "device": (0, 1 << 15),
        "op": (-1, len(trace.ops)),
        "module": (0, strings),
        "phase": (0, max(Phase) + 1),
        "step": (0, 1 << 31),
        "source": (0, strings),
        "provenance": (0, max(Provenance) + 1),
        "aux": (-1, MAX_ADDRESS),
    }
    for name, (low, high) in bounds.items():
        _within(where, f"events.{name}", getattr(events, name), low, high)


def _check_ops(trace: Trace, where: str) -> None:
    ops, strings, storages = trace.ops, len(trace.strings), len(trace.storages)
    bounds = {
        "name": (0, strings),
        "event": (0, len(trace.events) + 1),
        "module": (0, strings),
        "phase": (0, max(Phase) + 1),
        "step": (0, 1 << 31),
        "source": (0, strings),
        "operands": (0, strings),
        "stream": (-1, 1 << 31),
        "call": (-(1 << 30), 1 << 31),
        "flops": (0, MAX_FLOPS),
        "moved_bytes": (-1, MAX_MOVED_BYTES),
        "reads": (0, storages),
        "writes": (0, storages),
    }
    for name, (low, high) in bounds.items():
        _within(where, f"ops.{name}", getattr(ops, name), low, high)
    for name in ("reads", "writes"):
        starts = getattr(ops, f"{name}_start")
        ascending = len(starts) == len(ops) + 1 and bool(np.all(starts[1:] >= starts[:-1]))
        if not ascending or starts[0] != 0 or starts[-1] != len(getattr(ops, name)):
            raise _error(where, f"ops.{name}_start does not divide ops.{name} into rows")


def _check_segments(meta: TraceMeta, storages: int, where: str) -> None:
    for segment in meta.initial_segments:
        place = f"the initial segment at {segment.address:#x}"
        end = segment.address + segment.bytes
        sane = 0 <= segment.address < end <= MAX_ADDRESS and segment.bytes < MAX_BYTES
        if not sane or not 0 <= segment.device < 1 << 15 or not -1 <= segment.stream < 1 << 31:
            raise _error(where, f"{place} has a size, device or stream out of range")
        reached = segment.address
        for block in segment.blocks:
            inside = reached <= block.address and block.address + block.bytes <= end
            if not inside or block.bytes <= 0 or not 0 <= block.requested_bytes < MAX_BYTES:
                raise _error(where, f"{place} has blocks that overlap or leave it")
            if not -2 <= block.storage < storages:
                raise _error(where, f"{place} holds a storage that does not exist")
            reached = block.address + block.bytes


def _within(where: str, name: str, column: _Column, low: int, high: int) -> None:
    if len(column) and not (low <= int(column.min()) and int(column.max()) < high):
        row = int(np.argmax((column < low) | (column >= high)))
        raise _error(where, f"{name}[{row}] is {column[row]}, outside [{low}, {high})")


def _error(where: str, what: str) -> FormatError:
    return FormatError(f"{where}: {what}", "make the file again; this one is damaged")
