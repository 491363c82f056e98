"""The trace file: `magic | version | zstandard frame of (header length | header | columns)`.

The header is msgpack: where the trace comes from, its strings and how many rows each table has.
The columns follow as raw little-endian numbers, in the order and with the types that the
dataclasses of `memplan.types.trace` declare; nothing in the file chooses a type. The frame states
its size and ends in a checksum. `docs/trace.md` describes the format for readers.

Files are untrusted: sizes are checked before memory is taken, every index before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

from memplan.types.errors import FormatError, UsageError
from memplan.types.output_file import refuse_existing, write_file
from memplan.types.trace import (
    Events,
    HostEvents,
    Ops,
    Storages,
    Trace,
    TraceMeta,
    columns_of,
)
from memplan.types.trace_check import check_trace

MAGIC = b"\x93memplan trace\n"
VERSION = 6
_ADDED = {2: {"call": -1, "flops": 0, "moved_bytes": -1}, 5: {"operands": 0}}
"""The columns of `Ops` that each version of the format added, with their values for older files."""
MAX_DECOMPRESSED_BYTES = 4 << 30
_MAX_HEADER_BYTES = 512 << 20
_LEVEL = 1
_PREFIX = struct.Struct(f"<{len(MAGIC)}sH")
_HEADER_LENGTH = struct.Struct("<Q")


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    meta: TraceMeta
    strings: list[str]
    events: int
    ops: int
    reads: int
    writes: int
    storages: int
    host: int = 0


def save_trace(trace: Trace, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a trace; whole or not at all.

    Raises UsageError when `path` exists and `overwrite` is False, or cannot be written.
    """
    path = Path(path)
    refuse_existing(path, overwrite=overwrite)
    check_trace(trace, "the trace to save")
    header = msgspec.msgpack.encode(
        _Header(
            meta=trace.meta,
            strings=trace.strings,
            events=len(trace.events),
            ops=len(trace.ops),
            reads=len(trace.ops.reads),
            writes=len(trace.ops.writes),
            storages=len(trace.storages),
            host=len(trace.host),
        )
    )
    columns = [
        np.ascontiguousarray(getattr(table, name), dtype).data
        for table in (trace.events, trace.ops, trace.storages, trace.host)
        for name, dtype in columns_of(type(table))
    ]
    size = _HEADER_LENGTH.size + len(header) + sum(column.nbytes for column in columns)
    pieces = [_HEADER_LENGTH.pack(len(header)), header, *columns]
    write_file(path, _compressed(pieces, size), overwrite=overwrite)


def _compressed(pieces: list[Any], size: int) -> Iterator[bytes]:
    yield _PREFIX.pack(MAGIC, VERSION)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    frame = compressor.compressobj(size=size)
    for piece in pieces:
        yield frame.compress(piece)
    yield frame.flush()


def load_trace(path: Path | str) -> Trace:
    """Read a trace written by `save_trace`.

    Raises FormatError when the file is truncated, damaged, of another kind, or written by a newer
    memplan; UsageError when it cannot be read at all.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size)
            version = _check_prefix(path, prefix)
            _check_size(path, path.stat().st_size)
            frame = file.read()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", "check the name and its rights"
        ) from error
    try:
        content = _decompress(path, frame)
        header, start = _read_header(path, content)
        trace = _read_columns(path, content, header, start, version)
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    check_trace(trace, str(path))
    return trace


def _check_prefix(path: Path, prefix: bytes) -> int:
    """The file's version."""
    if not prefix.startswith(MAGIC):
        if prefix and MAGIC.startswith(prefix):
            raise _damaged(path, "it ends within its first bytes")
        raise FormatError(
            f"{path} is not a memplan trace",
            "a file written by `memplan estimate -o TRACE` or `memplan run --record TRACE`",
        )
    if len(prefix) < _PREFIX.size:
        raise _damaged(path, "it ends within its first bytes")
    version = int(_PREFIX.unpack(prefix)[1])
    if version > VERSION:
        raise FormatError(
            f"{path} is a memplan trace of version {version}; this memplan reads up to {VERSION}",
            "upgrade memplan, or capture the trace again with this one",
        )
    if version < 1:
        raise _damaged(path, "its version is 0")
    return version


def _check_size(path: Path, size: int) -> None:
    if size > MAX_DECOMPRESSED_BYTES:
        raise FormatError(
            f"{path} claims to hold {size} bytes; at most {MAX_DECOMPRESSED_BYTES} are read",
            "a trace of fewer steps",
        )


def _decompress(path: Path, frame: bytes) -> memoryview:
    """The frame's content. Its stated size bounds what is allocated, its checksum is verified."""
    size = zstandard.frame_content_size(frame)
    if size < 0:
        raise _damaged(path, "it does not state its size")
    _check_size(path, size)
    content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    return memoryview(content)


def _read_header(path: Path, content: memoryview) -> tuple[_Header, int]:
    if len(content) < _HEADER_LENGTH.size:
        raise _damaged(path, "it holds no header")
    length = _HEADER_LENGTH.unpack_from(content)[0]
    start = _HEADER_LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > len(content):
        raise _damaged(path, "its header is longer than the file")
    header = msgspec.msgpack.decode(content[_HEADER_LENGTH.size : start], type=_Header)
    counts = (header.events, header.ops, header.reads, header.writes, header.storages, header.host)
    if min(counts) < 0:
        raise _damaged(path, "a table has a negative number of rows")
    return header, start


def _read_columns(
    path: Path, content: memoryview, header: _Header, start: int, version: int
) -> Trace:
    missing = {
        name: value
        for added_in, columns in _ADDED.items()
        if added_in > version
        for name, value in columns.items()
    }
    rows = {
        "reads": header.reads,
        "writes": header.writes,
        "reads_start": header.ops + 1,
        "writes_start": header.ops + 1,
    }
    layout = [
        (table, name, dtype, rows.get(name, count) if table is Ops else count)
        for table, count in (
            (Events, header.events),
            (Ops, header.ops),
            (Storages, header.storages),
            (HostEvents, header.host),
        )
        for name, dtype in columns_of(table)
        if table is not Ops or name not in missing
    ]
    expected = start + sum(np.dtype(dtype).itemsize * count for *_, dtype, count in layout)
    if expected != len(content):
        raise _damaged(path, f"its columns take {len(content) - start} bytes, not the stated size")
    tables: dict[type, dict[str, np.ndarray]] = {table: {} for table, *_ in layout}
    for table, name, dtype, count in layout:
        column = np.frombuffer(content, dtype, count, start)
        start += column.nbytes
        # Columns start wherever the header ends; an aligned copy is what every later stage wants.
        tables[table][name] = column.astype(column.dtype.newbyteorder("="))
    for name, dtype in columns_of(Ops):
        if name in missing:
            tables[Ops][name] = np.full(header.ops, missing[name], np.dtype(dtype))
    return Trace(
        meta=header.meta,
        strings=header.strings,
        events=Events(**tables[Events]),
        ops=Ops(**tables[Ops]),
        storages=Storages(**tables[Storages]),
        host=HostEvents(**tables[HostEvents]),
    )


def _damaged(path: Path, what: str) -> FormatError:
    return FormatError(
        f"{path} is a damaged memplan trace: {what}", "copy it again, or capture it again"
    )
