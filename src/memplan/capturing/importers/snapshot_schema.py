"""The shape of `torch.cuda.memory._snapshot()`, checked before anything uses it.

Written after `torch/csrc/cuda/Module.cpp` (`THCPModule_memorySnapshot`) of torch 2.1 to 2.13;
fields that no version needs are not read, and fields that a version lacks have defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from memplan.capturing.importers.pickle_data import read_pickle
from memplan.types.errors import FormatError
from memplan.types.trace_check import MAX_BYTES

Size = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BYTES)]
Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Stream = Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)]
Device = Annotated[int, msgspec.Meta(ge=0, lt=1 << 15)]

Pool = tuple[int, int]
"""Identifier of a pool of segments."""
DEFAULT_POOL: Pool = (0, 0)
"""Any other is private, of a CUDA graph or of `torch.cuda.MemPool`."""

MAX_DEVICES = 1024


class SnapshotBlock(msgspec.Struct):
    """Part of a segment at the moment of the snapshot."""

    size: Size
    state: str
    """`active_allocated`, `active_pending_free` (`active_awaiting_free` in PyTorch's own
    documentation) or `inactive`."""
    requested_size: Size | None = None
    address: Address | None = None
    frames: Any = ()


class SnapshotSegment(msgspec.Struct):
    """Device memory held at the moment of the snapshot."""

    address: Address
    total_size: Size
    blocks: list[SnapshotBlock]
    stream: Stream = 0
    device: Device = 0
    is_expandable: bool = False
    segment_pool_id: Pool = DEFAULT_POOL


class Entry(msgspec.Struct):
    """One line of the allocator's history."""

    action: str
    size: Size = 0
    addr: Address = 0
    stream: Stream = 0
    time_us: int | None = None
    user_metadata: str | None = None
    device_free: Size | None = None
    """Only for `oom`."""
    pool_id: Pool | None = None
    """None where it is not known: older versions do not tell."""
    frames: Any = ()


class Snapshot(msgspec.Struct):
    """A snapshot; `device_traces[d]` is the history of device d, oldest first."""

    segments: list[SnapshotSegment]
    device_traces: list[list[Entry]]
    allocator_settings: dict[str, Any] = {}


_HINT = "a file written by torch.cuda.memory._dump_snapshot(FILE)"
_NO_HISTORY = (
    "call torch.cuda.memory._record_memory_history() before the training, "
    "and _dump_snapshot(FILE) after some steps of it"
)


def read_schema(path: Path) -> Snapshot:
    """The snapshot in a pickle file.

    Raises FormatError when the file is no such pickle, lacks a field, has one of another type or
    out of range, or holds no history; UsageError when it cannot be read.
    """
    data, size = read_pickle(path)
    if isinstance(data, list):
        raise FormatError(f"{path} holds segments without the allocator's history", _NO_HISTORY)
    if not isinstance(data, dict) or "segments" not in data:
        raise FormatError(f"{path} is a pickle, but no PyTorch memory snapshot", _HINT)
    traces = data.get("device_traces")
    if not isinstance(traces, list) or not any(traces):
        raise FormatError(f"{path} holds no allocator history", _NO_HISTORY)
    _check_lengths(path, data, size)
    try:
        return msgspec.convert(data, Snapshot)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{path} is no valid PyTorch memory snapshot: {error}", _HINT) from error


def _check_lengths(path: Path, data: dict[Any, Any], size: int) -> None:
    """A pickle can name one list many times; a snapshot does not, so what it unfolds to is bounded
    by the file's size."""
    segments = data["segments"] if isinstance(data["segments"], list) else []
    blocks = [s["blocks"] for s in segments if isinstance(s, dict) and "blocks" in s]
    unfolded = [part for part in (*data["device_traces"], *blocks) if isinstance(part, list)]
    if sum(map(len, unfolded)) > size or len(data["device_traces"]) > MAX_DEVICES:
        raise FormatError(f"{path} unfolds to more than it can hold", _HINT)
