"""Efficiency of whole jobs under four ways of placing them, by simulation (`layout_table.json`).

    python -m bench.layout [ROW…]

Captures that are not there yet are made first and kept (`bench/layout/rows.py`). Rows of the
mixture of experts are planned from the capture, where every expert gets the same load, and run
with uneven loads (`uneven.py`). With rows named, nothing is written.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from bench.layout.efficiency import (
    EXPANDABLE,
    Outcome,
    allocated_peak,
    online,
    planned_by_memplan,
    planned_by_stalloc,
    seconds_to_match,
)
from bench.layout.rows import ROWS, Row, row_trace
from bench.layout.uneven import uneven
from bench.results import write_result
from memplan.simulate import AllocatorSettings
from memplan.types.trace import Trace

SECONDS = 10.0
LARGE = 20_000
"""Requests from which on a plan is a large one."""
WAYS = ("native", "expandable", "stalloc", "memplan")


def measure(row: Row) -> dict[str, Any]:
    """One row of the table."""
    captured = row_trace(row)
    run = uneven(captured) if row.routed else captured
    outcomes = {
        "native": online(run, AllocatorSettings()),
        "expandable": online(run, EXPANDABLE),
        "stalloc": planned_by_stalloc(captured, run),
        "memplan": planned_by_memplan(captured, run, SECONDS),
    }
    return {
        "events": len(captured),
        "seconds_to_stalloc": _seconds_to_stalloc(row, captured, outcomes),
        "allocated_peak_bytes": allocated_peak(run),
        **{way: asdict(outcome) for way, outcome in outcomes.items()},
    }


def _seconds_to_stalloc(row: Row, captured: Trace, outcomes: dict[str, Outcome]) -> float:
    """To a plan no higher than STAlloc's. Under routing the two do not plan the same (ours has room
    for the dynamic requests): there, to our plan."""
    if row.routed:
        return outcomes["memplan"].seconds
    return seconds_to_match(captured, outcomes["stalloc"].arena_bytes, SECONDS)


def summary(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals look at."""
    ours = {name: row["memplan"]["efficiency"] for name, row in table.items()}
    lead = [ours[name] - row["expandable"]["efficiency"] for name, row in table.items()]
    routed = {row.name for row in ROWS if row.routed}
    large = [r["memplan"] for r in table.values() if r["memplan"]["planned"] >= LARGE]
    return {
        "large": len(large),
        "large_above_load": max((r["arena_bytes"] / r["load_bytes"] - 1 for r in large), default=1),
        "large_seconds": max((r["seconds"] for r in large), default=0.0),
        "rows": len(table),
        "least_static": min(value for name, value in ours.items() if name not in routed),
        "least_routed": min(value for name, value in ours.items() if name in routed),
        "above_expandable": sum(value > 0 for value in lead),
        "least_lead": min(lead),
        "stalloc_lower": sum(
            row["stalloc"]["arena_bytes"] < row["memplan"]["arena_bytes"]
            for name, row in table.items()
            if name not in routed
        ),
        "stalloc_faster": sum(
            row["stalloc"]["seconds"] < row["seconds_to_stalloc"] for row in table.values()
        ),
    }


def main(names: list[str]) -> None:
    table: dict[str, dict[str, Any]] = {}
    print(f"{'row':26s}" + "".join(f"{way:>12s}" for way in WAYS))
    for row in ROWS:
        if names and row.name not in names:
            continue
        table[row.name] = measure(row)
        values = (table[row.name][way]["efficiency"] for way in WAYS)
        print(f"{row.name:26s}" + "".join(f"{value:12.1%}" for value in values), flush=True)
    if not names:
        print(write_result("layout_table", {"table": table, "summary": summary(table)}))


if __name__ == "__main__":
    main(sys.argv[1:])
