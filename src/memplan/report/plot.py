"""Memory over time in a few lines of text, drawn in braille dots."""

from __future__ import annotations

from bisect import bisect_right

from memplan.report.text import format_bytes
from memplan.types.estimate import MemoryCurve

_GUTTER = 10
# Bit of each dot of a braille cell, [column][row from the top].
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
_SHOW_ROOM = 1.6
"""The room on the card is drawn when it is at most this many times the reserved peak: farther
away it would flatten the curve."""


def memory_plot(
    curve: MemoryCurve,
    *,
    width: int,
    height: int = 8,
    room_bytes: int | None = None,
    peak_event: int = -1,
    steps: int | None = None,
) -> list[str]:
    """Lines of at most `width` characters: allocated memory as an area, reserved as a line above
    it, the room left for PyTorch on the card as a broken line, the peak marked below. `steps`:
    optimizer steps completed at the end, where that is known.

    Empty for an empty curve or less than 30 characters.
    """
    cells = width - _GUTTER - 2
    if not curve.events or cells < 18:
        return []
    peak = max(curve.reserved_bytes)
    limit = room_bytes if room_bytes and room_is_near(curve, room_bytes) else 0
    top = max(peak, limit, 1)
    columns, rows = cells * 2, height * 4
    allocated = [_level(n, top, rows) for n in _spread(curve.allocated_bytes, columns)]
    reserved = [_level(n, top, rows) for n in _spread(curve.reserved_bytes, columns)]
    room = _level(limit, top, rows)
    body = _braille_rows(allocated, reserved, room, height)
    labels = {
        height - 1: "0",
        height - 1 - (_level(peak, top, rows) - 1) // 4: format_bytes(peak),
    }
    if room:
        labels.setdefault(height - 1 - (room - 1) // 4, format_bytes(limit))
    lines = [f"{labels.get(i, ''):>{_GUTTER}} │{row}".rstrip() for i, row in enumerate(body)]
    lines.append(" " * (_GUTTER + 2) + _marks(curve, cells, peak_event, steps))
    return [line[:width] for line in lines]


def room_is_near(curve: MemoryCurve, room_bytes: int) -> bool:
    """Whether the room on the card is drawn."""
    return 0 < room_bytes <= _SHOW_ROOM * max(curve.reserved_bytes, default=0)


def _spread(values: list[int], columns: int) -> list[int]:
    """Resample to `columns`, keeping each column's maximum."""
    count = len(values)
    return [
        max(
            values[i * count // columns : max((i + 1) * count // columns, i * count // columns + 1)]
        )
        for i in range(columns)
    ]


def _level(value: int, top: int, rows: int) -> int:
    """Dots from the bottom; anything above zero shows."""
    return min(rows, -(-value * rows // top))


def _braille_rows(allocated: list[int], reserved: list[int], room: int, height: int) -> list[str]:
    rows = height * 4
    grid = [[_BLANK] * (len(allocated) // 2) for _ in range(height)]
    for column, (filled, line) in enumerate(zip(allocated, reserved, strict=True)):
        dots = set(range(1, filled + 1)) | {line}
        if room and column % 4 < 2:
            dots.add(room)
        for dot in dots - {0}:
            down = rows - dot
            grid[down // 4][column // 2] |= _DOTS[column % 2][down % 4]
    return ["".join(chr(cell) for cell in row) for row in grid]


def _marks(curve: MemoryCurve, cells: int, peak_event: int, steps: int | None) -> str:
    """The line below: the peak's place, and the steps at both ends where they leave it legible."""
    last = curve.steps[-1]
    if steps is not None and steps > 1:  # what follows the last step belongs to none
        last = min(last, steps - 1)
    left, right = f"step {curve.steps[0]}", f"step {last}"
    start = end = cells // 2
    text = ""
    if peak_event >= 0:
        bucket = max(bisect_right(curve.events, peak_event) - 1, 0)
        place = min(bucket * cells // len(curve.events), cells - 1)
        fits = place + len("▲ peak") <= cells
        text = "▲ peak" if fits else "peak ▲"
        start = place if fits else place - len("peak ")
        end = start + len(text)
    head = left if start > len(left) else ""
    tail = right if cells - end > len(right) else ""
    return f"{head:<{start}}{text}{tail:>{cells - end}}".rstrip()
