"""The result file as the table of docs/scripts.md: `python -m bench.scripts.table` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.pages import END, between, markdown_table
from bench.results import ROOT, known_result
from bench.scripts.case import Case
from bench.scripts.suite import cases

DOCS = ROOT / "docs" / "scripts.md"
BEGIN = "<!-- written by bench.scripts.table; begin -->"
HEAD = ("`--only`", "script", "what broke", "how it was mended", "answer", "held to", "seconds")


def read() -> dict[str, Any]:
    """The results that are there, by the names of the cases."""
    return known_result("scripts")


def table(declared: list[Case], results: dict[str, Any]) -> list[str]:
    """Lines of Markdown, one for each case."""
    return markdown_table(HEAD, (_row(case, results.get(case.name)) for case in declared))


def page(text: str, lines: list[str]) -> str:
    """A page with the lines between its two marks. Raises ValueError where a mark is missing."""
    return between(text, BEGIN, END, "\n\n" + "\n".join(lines) + "\n\n")


def write_page() -> Path:
    """Bring the table of docs/scripts.md up to the result file."""
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(page(text, table(cases(), read())), encoding="utf-8")
    return DOCS


def _row(case: Case, result: dict[str, Any] | None) -> tuple[str, ...]:
    words = case.script or "`" + " ".join(case.argv) + "`"
    seconds = f"{result['seconds']:.0f}" if result and "seconds" in result else "–"
    return (
        f"`{case.name}`",
        f"{case.package.replace('==', ' ')}: {words}",
        case.broke,
        case.mended,
        _answer(result),
        _held_to(case, result),
        seconds,
    )


def _answer(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not measured"
    if result["complaints"]:
        return "**not as it should be**: " + "; ".join(map(_cell, result["complaints"]))
    if "peak_bytes" not in result:
        return f"exit code {result['exit_code']}"
    low, high = (_gib(result[key]) for key in ("low_bytes", "high_bytes"))
    return f"{_gib(result['peak_bytes'])} GiB ({low}–{high}) of {result['gpu']}"


def _held_to(case: Case, result: dict[str, Any] | None) -> str:
    held = []
    if case.floor:
        held.append(f"≥ {_gib(case.floor.nbytes)} GiB: {case.floor.says}")
    if case.published:
        words = f"{case.published.nbytes / 1e9:.2f} GB allocated: {case.published.says}"
        if result and "allocated_peak_bytes" in result:
            allocated = result["allocated_peak_bytes"]
            words += f"; answered {allocated / 1e9:.2f} GB"
            words += f" ({100 * (allocated / case.published.nbytes - 1):+.1f} %)"
        held.append(words)
    return ". ".join(held)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f}" if nbytes >= 2**30 else f"{nbytes / 2**30:.2f}"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:300]


if __name__ == "__main__":
    print(write_page())
