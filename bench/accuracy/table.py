"""The result file as the tables of `docs/accuracy.md`: `python -m bench.accuracy.table`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.pages import END, markdown_table, write_between
from bench.results import ROOT, result_path

DOCS = ROOT / "docs" / "accuracy.md"
BEGIN = "<!-- written by bench.accuracy.table; begin -->"
GIB = 2**30


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def line(row: dict[str, Any]) -> str:
    """A finished row for the terminal."""
    measured, estimated = row["measured_bytes"] / GIB, row["estimated_bytes"] / GIB
    low, high = row["low_bytes"] / GIB, row["high_bytes"] / GIB
    return (
        f"{row['key']:52s} {measured:6.2f} GiB measured  {estimated:6.2f} ({low:.2f} to {high:.2f})"
        f"  {signed(row['signed_error']):>8s}  {row['variant']:7s} {row['seconds']:6.1f} s"
    )


def rows_table(rows: list[dict[str, Any]], published: tuple[str, ...]) -> list[str]:
    """Measured beside estimated, a line a job, with the errors of published estimators."""
    head = ["job", "card", "measured GiB", "memplan GiB (low to high)", "error", *published]
    lines = []
    for row in rows:
        measured = row["measured_bytes"]
        low, high = row["low_bytes"] / GIB, row["high_bytes"] / GIB
        others = [row["published_bytes"].get(name) for name in published]
        mode = f" ({row['variant']})" if row["other_variants"] else ""
        cells = [
            row["key"] + mode,
            row["gpu"].removeprefix("NVIDIA ").removeprefix("GeForce "),
            f"{measured / GIB:.2f}",
            f"{row['estimated_bytes'] / GIB:.2f} ({low:.2f} to {high:.2f})",
            signed(row["signed_error"]),
            *("" if value is None else signed(value / measured - 1) for value in others),
        ]
        lines.append(cells)
    return markdown_table(head, lines)


def summary_table(jobs: dict[str, Any]) -> list[str]:
    """Medians and 90th percentiles, ours and the published ones."""
    columns = ("estimator", "jobs", "median error", "90th percentile", "worst")
    fixed = next(key for key in jobs if key.startswith("fixed_mode"))
    named = {
        "memplan": jobs,
        f"memplan, unrecorded modes taken as {fixed[-1]}": jobs[fixed],
        **jobs["published"],
    }
    lines = []
    for name, figures in named.items():
        errors = (figures[key] for key in ("median_error", "p90_error", "worst_error"))
        lines.append((name, str(figures["count"]), *map(percent, errors)))
    return markdown_table(columns, lines)


def markdown(result: dict[str, Any]) -> str:
    """The part of the page that comes from the result file."""
    data = result["data"]
    jobs, llm = data["jobs"], data["llm"]
    commit = (result["commit"] or "unknown")[:12]
    versions = result["versions"]
    parts = [
        f"Measured on {result['date'][:10]} at commit `{commit}` with torch {versions['torch']};"
        f" the jobs' transformers: {data['transformers_of_the_jobs']}.",
        "",
        *summary_table(jobs),
        "",
        f"The high bound is below the truth in {jobs['high_below_truth']} of {jobs['count']} jobs;"
        f" the interval's median width is {percent(jobs['median_interval_width'])}."
        f" All {jobs['count']} jobs ran on their card; `fits` says so of"
        f" {jobs['predicted_to_fit']}.",
        "",
        *rows_table(jobs["rows"], ("xmem", "dnnmem", "llmem", "schedtune")),
        "",
        "Larger language-model jobs; of one on several cards, one rank:",
        "",
        *rows_table(llm["rows"], ()),
        "",
        "What had to be assumed:",
        "",
        *(f"- `{row['key']}`: {row['assumed']}." for row in llm["rows"]),
    ]
    return "\n".join(parts)


def write_docs(result: Path, docs: Path = DOCS) -> None:
    """Put the tables between the page's two marks. Raises ValueError when a mark is missing."""
    tables = markdown(json.loads(result.read_text(encoding="utf-8")))
    write_between(docs, BEGIN, END, f"\n\n{tables}\n\n")


if __name__ == "__main__":
    write_docs(result_path("accuracy"))
