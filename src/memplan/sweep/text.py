"""A sweep as a table for a person, and as CSV."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator, Sequence

from memplan.report.text import (
    clean,
    format_bytes,
    interval_text,
    seconds_interval_text,
    seconds_text,
)
from memplan.sweep.answer import Row, Sweep

_SAID = {"fits_with_plan": "plan", "too_large": "too large", "not_done": "not done"}
_LONGEST_REASON = 100
_RANKED = {
    "cost": "cost",
    "seconds": "time",
    "samples_per_second": "throughput",
    "step_seconds": "step time",
    "peak_bytes": "memory, for step times are not known",
}
_FIELDS = tuple(
    name for name in Row.__struct_fields__ if name not in ("values", "command", "hint", "answer")
)


def table_lines(sweep: Sweep) -> Iterator[str]:
    """The first line is the answer."""
    yield _headline(sweep)
    yield ""
    rows = [_cells(row) for row in sweep.rows]
    used = [name for name in _columns(sweep.rows) if any(row.get(name) for row in rows)]
    widths = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) for name in used}
    yield "  " + "  ".join(name.rjust(widths[name]) for name in used)
    for row, cells in zip(sweep.rows, rows, strict=True):
        line = "  " + "  ".join(cells.get(name, "").rjust(widths[name]) for name in used)
        yield line + (f"  {_reason(row)}" if row.reason else "")
    yield ""
    best = sweep.rows[0] if sweep.rows[0].place else None
    for note in sweep.notes:
        yield f"  note: {clean(note)}"
    if best is not None:
        yield f"  best  on {best.gpu}: {clean(shlex.join(best.command))}"
        if best.answer:
            yield f"  next  memplan place {clean(best.answer)}"


def csv_text(sweep: Sweep) -> str:
    """One line a combination; bytes and seconds as numbers, an empty cell for what is not known."""
    options = list(sweep.rows[0].values)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_FIELDS[:2], *options, *_FIELDS[2:], "command"])
    for row in sweep.rows:
        fields = [getattr(row, name) for name in _FIELDS]
        values = [row.values[name] for name in options]
        writer.writerow([*fields[:2], *values, *fields[2:], shlex.join(row.command)])
    return out.getvalue()


def _headline(sweep: Sweep) -> str:
    good = sum(row.place is not None for row in sweep.rows)
    undone = sum(row.status == "not_done" for row in sweep.rows)
    said = f"{good} of {len(sweep.rows)} combinations fit"
    if good > 1:
        said += f", ranked by {_RANKED[sweep.ranked_by]}"
    return said + (f"; ended early, {undone} were not captured" if undone else "")


def _columns(rows: Sequence[Row]) -> list[str]:
    options = list(rows[0].values)
    figures = ("GPUs", "peak", "of", "step", "samples/s", "time", "cost", "plan adds", "")
    return ["#", "gpu", *options, *figures]


def _cells(row: Row) -> dict[str, str]:
    cells = {"#": str(row.place or ""), "gpu": row.gpu, **row.values}
    cells["GPUs"] = str(row.gpus or "")
    if row.peak_bytes is not None and row.low_bytes is not None and row.high_bytes is not None:
        cells["peak"] = interval_text(row.low_bytes, row.peak_bytes, row.high_bytes)
    if row.total_bytes is not None:
        cells["of"] = format_bytes(row.total_bytes)
    if row.step_seconds is not None:
        low, high = row.step_low_seconds or 0, row.step_high_seconds or 0
        cells["step"] = seconds_interval_text(low, row.step_seconds, high)
    if row.samples_per_second is not None:
        cells["samples/s"] = f"{row.samples_per_second:,.1f}"
    if row.seconds is not None:
        cells["time"] = _duration(row.seconds)
    if row.cost is not None:
        cells["cost"] = f"{row.cost:,.2f}" if row.cost >= 1 else f"{row.cost:.2g}"
    if row.added_fraction is not None:
        cells["plan adds"] = f"{row.added_fraction:.1%}"
    cells[""] = _SAID.get(row.status, row.status)
    return cells


def _duration(seconds: float) -> str:
    if seconds < 60:
        return seconds_text(seconds)
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _reason(row: Row) -> str:
    text = clean(row.reason)
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
