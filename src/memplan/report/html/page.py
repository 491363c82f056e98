"""The page: what an answer, a trace or a plan says, filled into the template as one HTML file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from memplan import __version__
from memplan.report.html.streams import StepSection
from memplan.report.html.tree import Node
from memplan.report.text import (
    clean,
    format_bytes,
    headline,
    interval_text,
    short_op,
    step_line,
    step_text,
)
from memplan.types.estimate import Estimate, MemoryCurve, RankEstimate
from memplan.types.trace import Assumption

SCRIPTS = ("data.js", "view.js", "timeline.js", "blocks.js", "streams.js", "main.js")
BANDS = (
    *("parameters", "gradients", "optimizer_state", "activations", "temporaries", "inputs"),
    *("workspaces", "communication", "engine", "unknown", "fragmentation", "context"),
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 710, 12, 208
"""The edges of the drawings in the template, in their own units."""


@dataclass(frozen=True)
class Part:
    """A category at the peak."""

    name: str
    band: str
    size: str
    share: float


@dataclass(frozen=True)
class Point:
    """A plan of the frontier, and where it is drawn."""

    x: float
    y: float
    low_y: float
    high_y: float
    peak: str
    adds: str
    fits: bool
    levers: str
    command: str


@dataclass(frozen=True)
class Frontier:
    """Plans of rising added time."""

    points: list[Point]
    ticks: list[dict[str, Any]]
    line: str
    card_y: float | None


@dataclass
class Page:
    """What the template shows; a section without content is left out."""

    title: str
    verdict: str
    tone: str = ""
    """`yes`, `no` or nothing: whether it fits."""
    second: str = ""
    command: str = ""
    parts: list[Part] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    levers: list[dict[str, str]] = field(default_factory=list)
    frontier: Frontier | None = None
    changes_title: str = ""
    changes: list[str] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    comparison: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, str] = field(default_factory=dict)
    curve: dict[str, Any] | None = None
    step: StepSection | None = None
    tree: Node | None = None
    peak_text: str = ""
    notes: list[str] = field(default_factory=list)


def render(page: Page) -> bytes:
    """The file. Foreign text is escaped wherever it stands; scripts and styles are our own."""
    files = resources.files("memplan.report.html")

    def read(name: str) -> str:
        return files.joinpath(name).read_text(encoding="utf-8")

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    style = environment.from_string(read("page.css")).render(bands=BANDS)
    text = environment.from_string(read("page.html")).render(
        page=page,
        version=__version__,
        style=Markup(style),  # our own text
        scripts=Markup("\n".join(read(name) for name in SCRIPTS)),
    )
    return text.encode("utf-8", "replace")


def estimate_page(answer: Estimate, title: str) -> Page:
    whole = max(answer.breakdown.total(), 1)
    parts = [
        Part(name.replace("_", " "), name, format_bytes(nbytes), nbytes / whole)
        for name, nbytes in sorted(answer.breakdown.items(), key=lambda item: -item[1])
        if nbytes > 0
    ]
    return Page(
        title=title,
        verdict=_first_big(headline(answer)),
        tone={True: "yes", False: "no", None: ""}[answer.fits],
        command=clean(" ".join(answer.command)),
        parts=parts,
        facts=_facts(answer),
        ranks=_ranks(answer),
        curve=_curve(answer.curve) if answer.curve.events else None,
        peak_text=_where(answer),
        notes=[*map(_assumption, answer.assumptions), *answer.notes],
    )


def _assumption(item: Assumption) -> str:
    return f"assumed: {item.text}{f' [{item.source}]' if item.source else ''}"


def _first_big(text: str) -> str:
    return text[:1].upper() + text[1:]


def _facts(answer: Estimate) -> list[tuple[str, str]]:
    facts = []
    if answer.gpu is not None:
        facts.append(("card", f"{answer.gpu.device_name}, {format_bytes(answer.gpu.total_bytes)}"))
    facts += [
        ("reserved by PyTorch at the peak", format_bytes(answer.reserved_peak_bytes)),
        ("allocated to tensors at most", format_bytes(answer.allocated_peak_bytes)),
    ]
    low, host, high = answer.host_low_bytes, answer.host_peak_bytes, answer.host_high_bytes
    if low is not None and host is not None and high is not None:
        facts.append(("host RAM", interval_text(low, host, high)))
    if answer.world_size is not None:
        facts.append(("rank", f"{answer.rank} of {answer.world_size}"))
    if line := step_line(answer):
        facts.append(("time", line))
    return [*facts, ("captured", f"{answer.events:,} events, {answer.steps} steps")]


def _where(answer: Estimate) -> str:
    peak = answer.peak
    if peak.event < 0:
        return "The peak is the state before the first event."
    what = " in ".join(filter(None, (short_op(peak.op), peak.module))) or "an unnamed operation"
    when = step_text(peak.step, peak.phase, answer.steps)
    return ", ".join(filter(None, (f"During {what}", peak.phase, when, peak.source)))


def _ranks(answer: Estimate) -> list[dict[str, Any]]:
    most = max((rank.high_bytes for rank in answer.ranks), default=1)
    return [_rank(rank, most) for rank in answer.ranks]


def _rank(rank: RankEstimate, most: int) -> dict[str, Any]:
    same = f"the same as rank {rank.same_as}" if rank.same_as is not None else ""
    return {
        "rank": rank.rank,
        "share": rank.peak_bytes / max(most, 1),
        "peak": format_bytes(rank.peak_bytes),
        "interval": f"{format_bytes(rank.low_bytes)} – {format_bytes(rank.high_bytes)}",
        "verdict": {True: "fits", False: "does not fit", None: ""}[rank.fits],
        "tone": {True: "yes", False: "no", None: ""}[rank.fits],
        "why": ", ".join(filter(None, (rank.why, same))),
    }


def scale(most: int) -> list[dict[str, Any]]:
    """Ticks of an axis up to `most` bytes, at round numbers of a unit."""
    unit = next((1 << shift for shift in (30, 20, 10) if most >= 1 << shift), 1)
    power = 10.0 ** math.floor(math.log10(max(most / 5 / unit, 1e-9)))
    step = next(n * power for n in (1, 2, 5, 10) if n * power * unit >= most / 5)
    ticks = [int(number * step * unit) for number in range(int(most / step / unit) + 1)]
    return [{"y": height(n, most), "text": format_bytes(n) if n else "0"} for n in ticks]


def height(nbytes: int, most: int) -> float:
    """The vertical position of a size in a drawing."""
    return round(_BOTTOM - (_BOTTOM - _TOP) * nbytes / max(most, 1), 1)


def across(share: float) -> float:
    """The horizontal position of a share of the width."""
    return round(_LEFT + (_RIGHT - _LEFT) * share, 1)


def _curve(curve: MemoryCurve) -> dict[str, Any]:
    most = max(curve.reserved_bytes)
    count = len(curve.events)
    xs = [across(number / max(count - 1, 1)) for number in range(count)]

    def line(values: list[int]) -> str:
        return " ".join(f"{x},{height(v, most)}" for x, v in zip(xs, values, strict=True))

    floor = height(0, most)
    return {
        "ticks": scale(most),
        "allocated": f"{_LEFT},{floor} {line(curve.allocated_bytes)} {xs[-1]},{floor}",
        "reserved": line(curve.reserved_bytes),
    }
