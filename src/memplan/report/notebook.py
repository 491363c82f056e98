"""Answers as HTML fragments for notebooks: escaped, without scripts, in the page's own colours, so
that they are read on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from memplan.report.difference import (
    UNNAMED,
    difference_headline,
    shown_parts,
    signed,
    tables,
)
from memplan.report.text import clean, format_bytes, headline, short_op, step_text
from memplan.types.difference import Difference
from memplan.types.estimate import Estimate, MemoryCurve
from memplan.types.trace import Trace

_WIDTH, _HEIGHT = 480, 90
_LARGEST = 5
_CELL = "text-align:left;padding:1px 14px 1px 0;background:none"


def html_of(answer: object) -> str:
    """The fragment of an `Estimate`, a `Trace` or a `Difference`."""
    if isinstance(answer, Estimate):
        return estimate_html(answer)
    if isinstance(answer, Difference):
        return difference_html(answer)
    assert isinstance(answer, Trace)
    return trace_html(answer)


def estimate_html(answer: Estimate) -> str:
    """The verdict, what fills the peak, where it is, memory over time, and the largest tensors."""
    total = max(answer.peak_bytes, 1)
    parts = [
        (name.replace("_", " "), format_bytes(size), f"{size / total:.0%}", _bar(size / total))
        for name, size in sorted(answer.breakdown.items(), key=lambda part: -part[1])
        if size
    ]
    largest = [
        (
            format_bytes(tensor.bytes * tensor.count),
            f"{tensor.count} x {tensor.shape} {tensor.dtype}".removeprefix("1 x ").strip(),
            tensor.name or " in ".join(filter(None, (short_op(tensor.op), tensor.module))),
            tensor.role.replace("_", " "),
            tensor.source,
        )
        for tensor in answer.largest[:_LARGEST]
    ]
    return box(
        headline(answer),
        answer.fits,
        table(parts),
        _where(answer),
        _curve(answer.curve),
        folded("largest tensors at the peak", table(largest)) if largest else "",
        *folded_notes(answer.notes),
    )


def trace_html(trace: Trace) -> str:
    """A trace's origin and content."""
    meta = trace.meta
    rows = [
        ("command", " ".join(meta.command)),
        ("from", f"{meta.origin}, {meta.method}"),
        ("card", meta.gpu),
        ("torch", meta.torch_version),
        ("optimizer steps", f"{meta.optimizer_steps:,}"),
        ("storages", f"{len(trace.storages):,}"),
        ("ended", meta.stop_reason),
    ]
    title = f"trace of {len(trace):,} events, {len(trace.ops):,} operators"
    return box(title, None, table([row for row in rows if row[1]]), *folded_notes(meta.notes))


def difference_html(answer: Difference) -> str:
    """What changed most, in each of the three ways to split the peaks."""
    parts = []
    for title, rows, _ in tables(answer):
        shown, _, _ = shown_parts(answer, rows)
        changes = [(signed(part.change_bytes), part.name or UNNAMED) for part in shown]
        if changes:
            parts.append(f"<div>{text(title)}</div>{table(changes)}")
    return box(difference_headline(answer), None, *parts, *folded_notes(answer.notes))


def box(title: str, fits: bool | None, *parts: str) -> str:
    """A fragment: its first line in bold, marked green or red by the verdict."""
    edge = {True: "#2da44e", False: "#d1434b", None: "#8b949e"}[fits]
    return (
        f'<div style="border-left:4px solid {edge};padding:2px 0 2px 10px;line-height:1.5">'
        f"<div><b>{text(title)}</b></div>{''.join(parts)}</div>"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    cells = ("".join(f'<td style="{_CELL}">{_cell(cell)}</td>' for cell in row) for row in rows)
    body = "".join(f'<tr style="background:none">{row}</tr>' for row in cells)
    return f'<table style="border:none;margin:4px 0">{body}</table>'


def folded(title: str, content: str) -> str:
    """What is seen when its title is clicked."""
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def folded_notes(notes: Iterable[str]) -> list[str]:
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    return [folded("notes", f"<ul>{items}</ul>")] if items else []


def text(foreign: str) -> str:
    """Text from a job, as text."""
    return escape(clean(foreign))


class Bar(str):
    """Markup of ours in a table's cell."""


def _cell(cell: str) -> str:
    return cell if isinstance(cell, Bar) else text(cell)


def _bar(share: float) -> Bar:
    width = max(round(120 * min(share, 1.0)), 1)
    return Bar(
        f'<span style="display:inline-block;height:.7em;width:{width}px;background:currentColor;'
        'opacity:.45"></span>'
    )


def _where(answer: Estimate) -> str:
    peak = answer.peak
    if peak.event < 0:
        return ""
    operator = " in ".join(filter(None, (short_op(peak.op), peak.module)))
    where = (operator, peak.phase, step_text(peak.step, peak.phase, answer.steps), peak.source)
    return f"<div>at the peak: {text(', '.join(filter(None, where)))}</div>"


def _curve(curve: MemoryCurve) -> str:
    """Reserved memory as a line, allocated memory as the area below it."""
    top = max(curve.reserved_bytes, default=0)
    if not top or len(curve.events) < 2:
        return ""
    step = _WIDTH / len(curve.events)

    def points(values: list[int]) -> str:
        heights = ((i, _HEIGHT - _HEIGHT * value / top) for i, value in enumerate(values))
        return " ".join(f"{x * step:.0f},{y:.1f} {(x + 1) * step:.0f},{y:.1f}" for x, y in heights)

    label = f"memory over time, up to {format_bytes(top)} reserved"
    return (
        f'<svg role="img" aria-label="{text(label)}" width="{_WIDTH}" height="{_HEIGHT + 2}" '
        f'viewBox="0 -1 {_WIDTH} {_HEIGHT + 2}" style="display:block;max-width:100%">'
        f'<title>{text(label)}</title><polygon points="0,{_HEIGHT} {points(curve.allocated_bytes)} '
        f'{_WIDTH},{_HEIGHT}" fill="currentColor" opacity=".3"/>'
        f'<polyline points="{points(curve.reserved_bytes)}" fill="none" stroke="currentColor" '
        'opacity=".8"/></svg>'
    )
