"""Any file that tells what an allocator was asked for, recognised by its content."""

from __future__ import annotations

from pathlib import Path

from memplan.capturing.importers.event_csv import read_event_csv
from memplan.capturing.importers.snapshot import read_snapshot
from memplan.types.errors import FormatError, UsageError
from memplan.types.trace import Trace
from memplan.types.trace_file import MAGIC, load_trace

ACCEPTED = (
    "a memplan trace (memplan estimate -o TRACE), a PyTorch memory snapshot "
    "(torch.cuda.memory._dump_snapshot), or an event CSV (action,address,bytes,stream)"
)

_PICKLE_PROTOCOL = 0x80
_OLD_PICKLE = (b"(dp", b"(lp", b"}q", b"]q")
"""How pickles of protocols 0 and 1 begin."""
_CSV_HEADER = b"action"
_OTHERS = {
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed by zstandard; unpack it first",
    b"\xfd7zXZ": "compressed by xz; unpack it first",
    b"{": "JSON",
    b"[": "JSON",
    b"<": "HTML or XML",
}


def load_any(path: Path | str) -> Trace:
    """Read a memplan trace, a PyTorch memory snapshot or an event CSV.

    Raises FormatError, listing what is accepted, for a file of another kind or a damaged one;
    UsageError when the file is missing or cannot be read.
    """
    path = Path(path)
    start = _first_bytes(path)
    if not start:
        raise FormatError(f"{path} is empty", ACCEPTED)
    if start.startswith(MAGIC[: len(start)]):
        return load_trace(path)
    if start[0] == _PICKLE_PROTOCOL or start.startswith(_OLD_PICKLE):
        return read_snapshot(path)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(_CSV_HEADER):
        return read_event_csv(path)
    kind = next((f": {name}" for magic, name in _OTHERS.items() if text.startswith(magic)), "")
    raise FormatError(f"{path} is none of the files that memplan reads{kind}", ACCEPTED)


def _first_bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", ACCEPTED)
        if not path.exists():
            raise UsageError(f"{path} does not exist", "check the name")
        if not path.is_file():
            raise UsageError(f"{path} is not an ordinary file", ACCEPTED)
        with path.open("rb") as file:
            return file.read(64)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path} cannot be read: {reason}", "check the name and its rights"
        ) from error
