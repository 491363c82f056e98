"""Results in pages: tables of Markdown, and what stands between the two marks of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end -->"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def between(text: str, begin: str, end: str, new: str) -> str:
    """`text` with `new` between its two marks. Raises ValueError where it lacks one."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"the page lacks {begin!r} or {end!r}")
    return before + first + new + last + after


def write_between(page: Path, begin: str, end: str, new: str) -> None:
    """The same in a file."""
    page.write_text(between(page.read_text(encoding="utf-8"), begin, end, new), encoding="utf-8")
