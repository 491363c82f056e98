"""Files of other tools as a `Trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.types.trace import Trace


def load_any(path: str | Path) -> Trace:
    """The trace in a file: memplan's own, a memory snapshot of PyTorch, or an allocator event CSV.

    What it is shows in its first bytes; its name does not matter.

    Raises:
        FormatError: none of the three, or damaged.
    """
    from memplan.types.errors import FormatError
    from memplan.types.trace_file import MAGIC, load_trace

    try:
        with Path(path).open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}", "check the path") from None
    if head and (head.startswith(MAGIC) or MAGIC.startswith(head)):
        return load_trace(path)
    if head.startswith(b"\x80"):
        from memplan.capture.importers.snapshot import read_snapshot

        return read_snapshot(path)
    if b"action" in head:
        from memplan.capture.importers.event_csv import read_event_csv

        return read_event_csv(path)
    raise FormatError(
        f"{path}: neither a trace of memplan, a PyTorch memory snapshot nor an allocator event log",
        "a snapshot is what torch.cuda.memory._dump_snapshot writes; "
        "a log begins with action,address,bytes,stream",
    )
