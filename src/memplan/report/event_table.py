"""A trace as a table: one row for each thing that the allocator did, as CSV.

The first four columns are those of an allocator event log, so that `memplan simulate` reads the
table back. The rest says where the job stood.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from memplan.report.memory_viz import history
from memplan.report.replayed import replayed
from memplan.types.output_file import write_file
from memplan.types.trace import Trace

COLUMNS = (
    *("action", "address", "bytes", "stream"),
    *("event", "step", "phase", "module", "op", "source", "tensor", "shape", "dtype"),
)
_ROWS_AT_ONCE = 10_000


def export_csv(trace: Trace, path: Path | str, *, device: int = 0, overwrite: bool = False) -> None:
    """Write what the simulated allocator did, in order; addresses are its own.

    A segment given back is the allocator's answer to a cache emptied or a card that is full. Its
    settings are not in the table: `memplan simulate --alloc-conf` takes them. Raises: as
    `export_memory_viz`.
    """
    write_file(Path(path), _lines(trace, device), overwrite=overwrite)


def _lines(trace: Trace, device: int) -> Iterator[bytes]:
    whole, timeline = replayed(trace, device=device)
    events, strings, storages = whole.events, whole.strings, whole.storages
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for number, entry in enumerate(history(whole, timeline)):
        index = entry["time_us"]
        at = whole.event(index)
        storage = int(events.storage[index]) if entry["action"] == "alloc" else -1
        tensor = (storages.name, storages.shape, storages.dtype)
        names = [strings[int(column[storage])] if storage >= 0 else "" for column in tensor]
        where = (at.step, at.phase.name.lower(), at.module, at.op, at.source)
        rows.writerow(
            (entry["action"], entry["addr"], entry["size"], entry["stream"], index, *where, *names)
        )
        if number % _ROWS_AT_ONCE == 0:
            yield text.getvalue().encode("utf-8", "replace")
            text.seek(0)
            text.truncate()
    yield text.getvalue().encode("utf-8", "replace")
