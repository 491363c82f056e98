"""Problems and layouts as files: MiniMalloc's CSV in, the same with an `offset` column out.

The columns `id,lower,upper,size` in any order, and perhaps `alignment` and `offset` (where a buffer
must lie; empty or -1 where it may lie anywhere). Files are untrusted: sizes are bounded, and the
first fault is named with its row.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memplan.layout.problem import Layout, Problem, ProblemError, make_problem
from memplan.types.errors import FormatError, UsageError
from memplan.types.output_file import write_file

MAX_BYTES = 256 << 20
MAX_ROWS = 4_000_000
_LONGEST_ID = 200
_NEEDED = ("id", "lower", "upper", "size")
_OPTIONAL = {"alignment": "1", "offset": "-1"}
"""The value of an empty or missing field."""
_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)
_LARGEST = (1 << 63) - 1
_FORMAT = "a header id,lower,upper,size and a row for each buffer, as MiniMalloc reads"


def read_problem(path: Path | str) -> Problem:
    """Read a problem.

    Raises UsageError when the file cannot be read, FormatError with the row and the reason when it
    is no problem.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise FormatError(f"{path} has more than {MAX_BYTES >> 20} MiB", "a smaller problem")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not text: byte {error.start} is no UTF-8", _FORMAT) from error
    return _parse(path, text)


def write_layout(
    problem: Problem, layout: Layout, path: Path | str, *, overwrite: bool = False
) -> None:
    """Write the problem with an `offset` column; whole or not at all.

    Raises UsageError when `path` exists and `overwrite` is False, or cannot be written.
    """
    columns = {"lower": problem.lower, "upper": problem.upper, "size": problem.size}
    if (problem.alignment != 1).any():
        columns["alignment"] = problem.alignment
    columns["offset"] = layout.offsets
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", *columns])
    values = (column.tolist() for column in columns.values())
    writer.writerows(zip(problem.ids, *values, strict=True))
    write_file(Path(path), [text.getvalue().encode()], overwrite=overwrite)


def _parse(path: Path, text: str) -> Problem:
    rows = _rows(path, text)
    header = [name.strip().lower() for name in next(rows, (0, []))[1]]
    place = _places(path, header)
    ids: list[str] = []
    lines: list[int] = []
    numbers: dict[str, list[int]] = {name: [] for name in (*_NEEDED[1:], *_OPTIONAL)}
    for line, row in rows:
        if len(row) != len(header):
            raise _fault(path, len(ids), line, f"{len(row)} fields, the header has {len(header)}")
        name = row[place["id"]].strip()
        if not name or len(name) > _LONGEST_ID:
            what = "no id" if not name else f"an id of {len(name)} characters"
            raise _fault(path, len(ids), line, what)
        for column, values in numbers.items():
            field = row[place[column]].strip() if column in place else ""
            try:
                values.append(_number(column, field))
            except ValueError as error:
                raise _fault(path, len(ids), line, str(error)) from None
        ids.append(name)
        lines.append(line)
        if len(ids) > MAX_ROWS:
            raise FormatError(f"{path} has more than {MAX_ROWS} buffers", "a smaller problem")
    if not ids:
        raise FormatError(f"{path} has a header but no buffers", _FORMAT)
    columns = {name: np.array(values, np.int64) for name, values in numbers.items()}
    fixed = columns.pop("offset")
    try:
        return make_problem(**columns, fixed=fixed, ids=tuple(ids))
    except ProblemError as error:
        raise _fault(path, error.row, lines[error.row], error.why) from None


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not empty, each with the number of its last line."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            if any(field.strip() for field in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise FormatError(f"{path}: line {reader.line_num}: {error}", _FORMAT) from error


def _places(path: Path, header: list[str]) -> dict[str, int]:
    if not header:
        raise FormatError(f"{path} is empty", _FORMAT)
    for name in header:
        shown = name if len(name) <= 40 else name[:40] + "…"
        if name not in _NEEDED and name not in _OPTIONAL:
            known = ", ".join((*_NEEDED, *_OPTIONAL))
            raise FormatError(f"{path}: column {shown!r} is not known", f"columns: {known}")
        if header.count(name) > 1:
            raise FormatError(f"{path}: column {name} is there twice", _FORMAT)
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        raise FormatError(f"{path}: no column {', '.join(missing)}", _FORMAT)
    return {name: number for number, name in enumerate(header)}


def _number(column: str, field: str) -> int:
    """Raises ValueError with the reason."""
    field = field or _OPTIONAL.get(column, "")
    if not field:
        raise ValueError(f"no {column}")
    if not _WHOLE.fullmatch(field):
        shown = field if len(field) <= 40 else field[:40] + "…"
        raise ValueError(f"{column} {shown!r} is not a whole number")
    digits = field.lstrip("+-0")
    if len(digits) > 19 or abs(int(field)) > _LARGEST:
        raise ValueError(f"{column} is beyond 2^63")
    return int(field)


def _fault(path: Path, row: int, line: int, why: str) -> FormatError:
    return FormatError(f"{path}: row {row + 1} (line {line}): {why}", _FORMAT)
