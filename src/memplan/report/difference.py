"""A `Difference` as text for a terminal and as Markdown for a comment; the first line is the
answer."""

from __future__ import annotations

import html
from collections.abc import Iterator

from rich.text import Text

from memplan.report.text import clean, cut_middle, format_bytes
from memplan.types.difference import ChangedPart, Difference

_ROWS = 10
_SMALL = 0.002
"""Changes below this share of the larger peak are summed up."""
_NAME = 52
UNNAMED = "(place unknown)"


def signed(change: int) -> str:
    """`+1.2 GiB`, `-340 MiB`, `±0 B`."""
    sign = "+" if change > 0 else "-" if change < 0 else "±"
    return f"{sign}{format_bytes(abs(change))}"


def difference_headline(answer: Difference) -> str:
    """`peak +1.2 GiB (+12 %): 10.1 GiB -> 11.3 GiB`."""
    old, new = answer.before.peak_bytes, answer.after.peak_bytes
    percent = f" ({answer.change_bytes / old:+.1%})".replace("%", " %") if old else ""
    if not answer.change_bytes:
        return f"peak unchanged: {format_bytes(new)}"
    return (
        f"peak {signed(answer.change_bytes)}{percent}: {format_bytes(old)} -> {format_bytes(new)}"
    )


def shown_parts(answer: Difference, parts: list[ChangedPart]) -> tuple[list[ChangedPart], int, int]:
    """The parts that changed most; how many more changed, and by how much these together."""
    changed = [part for part in parts if part.change_bytes]
    least = _SMALL * max(answer.before.peak_bytes, answer.after.peak_bytes)
    rows = [part for part in changed[:_ROWS] if abs(part.change_bytes) >= least]
    rest = changed[len(rows) :]
    return rows, len(rest), sum(part.change_bytes for part in rest)


def tables(answer: Difference) -> list[tuple[str, list[ChangedPart], float]]:
    """(title, parts, share attributed) of the three ways to split the peaks."""
    shares = answer.attributed
    return [
        ("by category", answer.categories, shares.categories),
        ("by module", answer.modules, shares.modules),
        ("by source line", answer.sources, shares.sources),
    ]


def difference_lines(answer: Difference) -> Iterator[Text]:
    """The report's lines."""
    yield Text(difference_headline(answer), style="bold")
    for side in (answer.before, answer.after):
        verdict = {True: ", fits", False: ", does not fit", None: ""}[side.fits]
        yield Text(
            f"  {format_bytes(side.peak_bytes):>10}{verdict}  {clean(side.file)}", style="dim"
        )
    for title, parts, share in tables(answer):
        rows, more, rest = shown_parts(answer, parts)
        if not rows and not more:
            continue
        yield Text()
        known = "" if share >= 0.995 else f"  {share:.0%} of the change has a place"
        yield Text.assemble((title, "bold"), (known, "dim"))
        for part in rows:
            yield _row(part)
        if more:
            what = f"{more} more" if rows else f"{more} small changes"
            yield Text(f"  {what:<{_NAME}}{'':>24}{signed(rest):>12}", style="dim")
    for note in answer.notes:
        yield Text.assemble(("note  ", "dim"), clean(note))


def _row(part: ChangedPart) -> Text:
    name = cut_middle(clean(part_words(part)), _NAME - 2)
    figures = f"{format_bytes(part.before_bytes):>10} ->{format_bytes(part.after_bytes):>10}  "
    style = "red" if part.change_bytes > 0 else "green"
    return Text.assemble(f"  {name:<{_NAME}}{figures}", (f"{signed(part.change_bytes):>12}", style))


def part_words(part: ChangedPart) -> str:
    """A category's name as a person reads it; modules and lines as they are."""
    return part.name.replace("optimizer_state", "optimizer state") or UNNAMED


def difference_markdown(answer: Difference) -> str:
    """Markdown for a comment: the change by category, and modules and lines to unfold."""
    lines = [f"**GPU memory: {difference_headline(answer)}**", ""]
    for number, (title, parts, share) in enumerate(tables(answer)):
        rows, more, rest = shown_parts(answer, parts)
        if not rows and not more:
            continue
        if number:
            lines += [f"<details><summary>{title}</summary>", ""]
        lines += ["| | before | after | change |", "| --- | ---: | ---: | ---: |"]
        for part in rows:
            old, new = format_bytes(part.before_bytes), format_bytes(part.after_bytes)
            lines.append(
                f"| {_cell(part_words(part))} | {old} | {new} | {signed(part.change_bytes)} |"
            )
        if more:
            lines.append(f"| {more} more | | | {signed(rest)} |")
        lines.append("")
        if share < 0.995:
            lines += [f"{share:.0%} of the change has a place.", ""]
        if number:
            lines += ["</details>", ""]
    lines += [line for note in answer.notes for line in (_cell(note, code=False), "")]
    return "\n".join(lines)


def _cell(text: str, *, code: bool = True) -> str:
    """Foreign text that Markdown and HTML leave as it is."""
    safe = html.escape(clean(text), quote=False).replace("|", "&#124;").replace("`", "&#96;")
    return f"<code>{safe}</code>" if code else safe
