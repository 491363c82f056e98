"""The result file as tables: `python -m bench.recompute.table` writes docs/recompute-results.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.pages import END, markdown_table, write_between
from bench.recompute.summary import REDUCTIONS
from bench.results import ROOT, result_path

DOCS = ROOT / "docs" / "recompute-results.md"
BEGIN = "<!-- written by bench.recompute.table; begin -->"
MIB = 2**20


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def added(row: dict[str, Any]) -> str:
    """Peak beyond what was alive before, with the time that it costs."""
    return f"{mib(row['beyond_bytes'])} ({100 * row['added_fraction']:+.0f} %)"


def line(part: str, name: str, data: dict[str, Any]) -> str:
    """What became of one model or graph, for the terminal."""
    failure = data["failures"].get(f"{part}.{name}")
    if failure is not None:
        return f"{part} {name}: {failure}"
    row = data[part][name]
    if part == "budgets":
        curve = row.get("memplan")
        told = (
            "not measured"
            if curve is None
            else f"above at {curve['above']} of {len(curve['rows'])}"
        )
        return f"budget {name}: PyTorch inverts {row['pytorch_inversions']} times; ours {told}"
    mine = added(row["memplan"]) if "memplan" in row else "not measured"
    ways = ("plain", "best_segments", "sqrt_n", "per_block")
    return f"{name}: " + ", ".join(f"{way} {added(row[way])}" for way in ways) + f", ours {mine}"


def peaks_table(found: dict[str, Any]) -> list[str]:
    head = ["model", "plain", "best segments", "Chen √n", "per block", "memplan", "promise off by"]
    rows = []
    for name, row in found.items():
        best = row["best_segments"]
        mine = row.get("memplan")
        rows.append([
            name,
            mib(row["plain"]["beyond_bytes"]),
            f"{added(best)}, {best['segments']}",
            added(row["sqrt_n"]),
            added(row["per_block"]),
            added(mine) if mine else "",
            percent(mine["prediction_error"]) if mine else "",
        ])  # fmt: skip
    return markdown_table(head, rows)


def reductions_table(found: dict[str, Any]) -> list[str]:
    head = ["model", "plain", "best baseline", "memplan", "reduction", "time added", "published"]
    rows = []
    for name, published in REDUCTIONS.items():
        if name not in found:
            continue
        both = found[name]["accumulating"]
        mine = found[name].get("memplan")
        ours = ["", "", ""]
        if mine is not None:
            figures = (mine["reduction"], mine["accumulating_added_fraction"])
            ours = [mib(mine["accumulating_bytes"]), *map(percent, figures)]
        cells = [name, mib(both["plain_bytes"]), mib(both["best_baseline_bytes"])]
        rows.append([*cells, *ours, percent(published)])
    return markdown_table(head, rows)


def budget_table(row: dict[str, Any]) -> list[str]:
    """PyTorch's settings, each with ours at the same peak where the setting is one of its best."""
    ours = {r["budget_beyond_bytes"]: r for r in row.get("memplan", {}).get("rows", [])}
    rows = []
    for point in row["pytorch"]:
        mine = ours.get(point["beyond_bytes"], {})
        rows.append([
            point["solver"],
            str(point["budget"]),
            mib(point["beyond_bytes"]),
            percent(point["added_flops_fraction"]),
            mib(mine["beyond_bytes"]) if "beyond_bytes" in mine else "none" if mine else "",
            percent(mine["added_flops_fraction"]) if "beyond_bytes" in mine else "",
        ])  # fmt: skip
    head = ["solver", "budget", "PyTorch MiB", "FLOPs added", "memplan MiB", "FLOPs added"]
    return markdown_table(head, rows)


def _when(measured: dict[str, Any]) -> str:
    return f"on {measured['date'][:10]} at commit `{(measured['commit'] or 'unknown')[:12]}`"


def markdown(result: dict[str, Any]) -> str:
    """The part of the page that comes from the result file."""
    data = result["data"]
    parts = [
        f"Models measured {_when(data.get('models_measured', result))}, budgets"
        f" {_when(data.get('budgets_measured', result))}, with torch"
        f" {result['versions']['torch']} on {result['machine']['cpu']}, one thread a process.",
        "",
        "Peak beyond weights and inputs in MiB (time added); for segments, how many:",
        "",
        *peaks_table(data["models"]),
        "",
        "Peak beyond weights and existing gradients in MiB, beside what Feng & Huang publish:",
        "",
        *reductions_table(data["models"]),
        "",
    ]
    for name, row in data["models"].items():
        parts.append(f"- {name}: {row['says']}; {row['units']} units.")
    for name, row in data["budgets"].items():
        eager = mib(row["eager_beyond_bytes"])
        parts += ["", f"{name}: {row['says']}; eager {eager} MiB.", "", *budget_table(row)]
    parts += [f"- {name} failed: {told}" for name, told in data["failures"].items()]
    return "\n".join(parts)


def write_docs(result: Path, docs: Path = DOCS) -> None:
    """Put the tables between the page's two marks. Raises ValueError when a mark is missing."""
    tables = markdown(json.loads(result.read_text(encoding="utf-8")))
    write_between(docs, BEGIN, END, f"\n\n{tables}\n\n")


if __name__ == "__main__":
    write_docs(result_path("recompute"))
