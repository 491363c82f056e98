"""Allocator event logs as CSV, with the columns `action,address,bytes,stream`.

The actions are those of `torch.cuda.memory._snapshot()["device_traces"]`.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from memplan.types.builder import TraceBuilder
from memplan.types.errors import FormatError
from memplan.types.trace import EventKind, Trace, TraceMeta

HEADER = ["action", "address", "bytes", "stream"]
MAX_FILE_BYTES = 2 << 30
MAX_ROWS = 20_000_000
MAX_SIZE = 1 << 48
"""Largest size of a block or segment that is believed."""

_MARKS = {"snapshot", "user_defined", "workspace_snapshot"}
OBSERVED = {
    "segment_alloc": EventKind.SEGMENT_ALLOC,
    "segment_free": EventKind.SEGMENT_FREE,
    "segment_map": EventKind.SEGMENT_MAP,
    "segment_unmap": EventKind.SEGMENT_UNMAP,
    "oom": EventKind.OUT_OF_MEMORY,
}
"""Kinds of events by PyTorch's own names, which snapshots have, too."""
GIVEN_BACK = {"segment_free", "segment_unmap"}


def read_event_csv(path: str | Path) -> Trace:
    """The trace of one device from an event log.

    Each `alloc` begins a storage generation that the next frees of its address end; a free of an
    address that holds nothing ends one from before the log. Streams, often the values of pointers,
    become numbers in order of appearance, 0 staying 0. Where the process gives segments back, the
    log does not say what made it do so: `EMPTY_CACHE` is placed before the first of them.

    Raises:
        FormatError: not such a file, with the line at fault; too large; not readable as text.
        UsageError: no such file.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise FormatError(
                f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read", "a part of the log"
            )
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}", "check the path") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not text ({error.reason} at byte {error.start})") from None
    rows = csv.reader(io.StringIO(text), strict=True)
    reader = _Reader(str(path))
    try:
        header = next(rows, [])
        if [name.strip() for name in header[: len(HEADER)]] != HEADER:
            raise FormatError(
                f"{path}, line 1: not an allocator event log", f"the header is {','.join(HEADER)}"
            )
        for row in rows:
            if row:
                reader.add(row, rows.line_num)
    except csv.Error as error:
        raise FormatError(f"{path}, line {rows.line_num}: {error}") from None
    return reader.trace()


class _Reader:
    """Rows in, events out; knows which storage holds which address."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._builder = TraceBuilder()
        self._streams: dict[int, int] = {0: 0}
        self._held: dict[int, int] = {}
        """Address to the storage that the program holds there."""
        self._released: dict[int, int] = {}
        """Address to the storage whose release was requested but not completed."""
        self._giving_back = False

    def add(self, row: list[str], line: int) -> None:
        try:
            action, address_text, bytes_text, stream_text = row[:4]
            address = int(address_text or -1)
            nbytes = int(bytes_text or 0)
            stream = self._stream(int(stream_text or 0))
        except ValueError:
            raise self._error(line, f"not {','.join(HEADER)}: {','.join(row)[:80]!r}") from None
        if not 0 <= nbytes <= MAX_SIZE or not -1 <= address < 1 << 62:
            raise self._error(line, f"impossible size or address: {nbytes} at {address}")
        if line > MAX_ROWS:
            raise self._error(line, f"more than {MAX_ROWS} rows")
        given_back = action in GIVEN_BACK
        if given_back and not self._giving_back:
            self._builder.append(EventKind.EMPTY_CACHE)
        self._giving_back = given_back
        if action == "alloc":
            self._alloc(address, nbytes, stream, line)
        elif action in ("free_requested", "free"):
            storage = self._take(self._held, address)
            self._released[address] = storage
            self._builder.append(EventKind.FREE, storage, nbytes, stream=stream, aux=address)
        elif action == "free_completed":
            self._free_completed(address, nbytes, stream)
        elif action in OBSERVED:
            self._builder.append(OBSERVED[action], -1, nbytes, stream=stream, aux=address)
        elif action in _MARKS:
            self._builder.append(EventKind.MARK)
        else:
            raise self._error(line, f"unknown action {action[:40]!r}")

    def trace(self) -> Trace:
        return self._builder.build(TraceMeta(origin="csv", method="observed"))

    def _alloc(self, address: int, nbytes: int, stream: int, line: int) -> None:
        if address < 0:
            raise self._error(line, "an allocation without an address")
        if address in self._held:
            raise self._error(line, f"address {address} is allocated twice")
        storage = self._held[address] = self._builder.new_storage()
        self._builder.append(EventKind.ALLOC, storage, nbytes, stream=stream, aux=address)

    def _free_completed(self, address: int, nbytes: int, stream: int) -> None:
        storage = self._released.pop(address, None)
        if storage is None:
            storage = self._take(self._held, address)
        self._builder.append(EventKind.FREE_COMPLETED, storage, nbytes, stream=stream, aux=address)

    def _take(self, holders: dict[int, int], address: int) -> int:
        storage = holders.pop(address, None)
        return self._builder.new_storage() if storage is None else storage

    def _stream(self, value: int) -> int:
        return self._streams.setdefault(value, len(self._streams))

    def _error(self, line: int, what: str) -> FormatError:
        return FormatError(f"{self._path}, line {line}: {what}")
