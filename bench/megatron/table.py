"""The result file as sums and as the table of docs/megatron.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.pages import markdown_table
from bench.results import ROOT, known_result
from bench.scripts.table import page

DOCS = ROOT / "docs" / "megatron.md"
HEAD = ("case", "card", "measured, MB", "answered, MB", "error", "interval", "seconds")


def read() -> dict[str, Any]:
    """Results that are there, by case and card."""
    found: dict[str, Any] = known_result("megatron").get("cases", {})
    return found


def summary(cases: dict[str, Any], known: int) -> dict[str, Any]:
    """What the goals look at: of the cases that count, those that were run, fractions of them."""
    counted = [item for item in cases.values() if not item["apart"]]
    answered = [item for item in counted if item["answered"]]
    errors = sorted(abs(item["error"]) for item in answered)
    return {
        "known": known,
        "run": len(counted),
        "answered": len(answered),
        "answered_fraction": _fraction(len(answered), len(counted)),
        "near": sum(item["near"] for item in answered),
        "near_fraction": _fraction(sum(item["near"] for item in answered), len(answered)),
        "outside": sum(not item["inside"] for item in answered),
        "median_error": statistics.median(errors) if errors else None,
        "largest_error": errors[-1] if errors else None,
        "most_host_bytes": max((item["host_bytes"] for item in answered), default=0),
        "apart": sum(bool(item["apart"]) for item in cases.values()),
    }


def _fraction(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def table(cases: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    return markdown_table(HEAD, (_row(name, item) for name, item in cases.items()))


def _row(name: str, item: dict[str, Any]) -> tuple[str, ...]:
    case, _, card = name.rpartition("@")
    measured = f"{item['max_allocated'] / 1e6:,.0f}"
    first = f"`{case}`" + (f" ({item['apart']})" if item["apart"] else "")
    seconds = f"{item['seconds']:.0f}" if "seconds" in item else "–"
    if not item["answered"]:
        said = item["complaint"].replace("|", "/").replace("\n", " ")
        return (first, card, measured, f"none: {said[:160]}", "", "", seconds)
    inside = "inside" if item["inside"] else "**outside**"
    found = f"{item['allocated_peak_bytes'] / 1e6:,.0f}"
    return (first, card, measured, found, f"{100 * item['error']:+.2f} %", inside, seconds)


def write_page() -> Path:
    """Bring the table of docs/megatron.md up to the result file."""
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(page(text, table(read())), encoding="utf-8")
    return DOCS
