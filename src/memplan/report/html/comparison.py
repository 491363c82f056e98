"""The page of a `Difference`: what makes one peak higher than another."""

from __future__ import annotations

from typing import Any

from memplan.report.difference import (
    difference_headline,
    part_words,
    shown_parts,
    signed,
    tables,
)
from memplan.report.html.page import Page
from memplan.report.text import format_bytes
from memplan.types.difference import ChangedPart, Difference


def difference_page(answer: Difference) -> Page:
    """The change by category, by module and by source line, with bars in either direction."""
    headline = difference_headline(answer)
    page = Page(
        title=f"{answer.before.file} and {answer.after.file}",
        verdict=headline[:1].upper() + headline[1:],
        notes=list(answer.notes),
    )
    for title, parts, share in tables(answer):
        rows, more, rest = shown_parts(answer, parts)
        most = max((abs(part.change_bytes) for part in rows), default=1)
        page.comparison.append(
            {
                "title": f"Change {title}",
                "known": "" if share >= 0.995 else f"{share:.0%} of the change has a place.",
                "rows": [_row(part, most) for part in rows],
                "more": f"{more} more: {signed(rest)}" if more else "",
            }
        )
    return page


def _row(part: ChangedPart, most: int) -> dict[str, Any]:
    return {
        "name": part_words(part),
        "before": format_bytes(part.before_bytes),
        "after": format_bytes(part.after_bytes),
        "change": signed(part.change_bytes),
        "grew": part.change_bytes > 0,
        "share": abs(part.change_bytes) / most,
    }
