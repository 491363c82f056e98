"""The order of rows, what it is made from, and how it is written."""

from __future__ import annotations

import csv
import io
from typing import Any

import msgspec
import pytest

from memplan.sweep.answer import Kept, Row, Sweep
from memplan.sweep.rank import ranked
from memplan.sweep.run import Cell, Done
from memplan.sweep.samples import Samples
from memplan.sweep.text import csv_text, table_lines
from memplan.types.estimate import Estimate
from tests.placement.answers import GIB, answer_of


def _cell(gpu: str, batch: int, samples: int | None = None) -> Cell:
    told = None if samples is None else Samples(samples, 1, 1)
    return Cell(gpu, {"batch-size": str(batch)}, ["train.py"], samples=told)


def _answer(gpu: str, high: int, step: float | None, **fields: Any) -> Estimate:
    interval = (None, None) if step is None else (0.5 * step, 2 * step)
    return answer_of(
        gpu,
        high,
        step_seconds=step,
        step_low_seconds=interval[0],
        step_high_seconds=interval[1],
        **fields,
    )


def _kept(
    gpu: str, high: int, status: Any = "fits", step: float | None = None, **fields: Any
) -> Kept:
    before = _answer(gpu, high, step)
    return Kept(status=status, fits=status != "too_large", before=before, **fields)


def test_without_step_times_the_least_memory_comes_first() -> None:
    cells = [_cell("h100", 16), _cell("h100", 8), _cell("h100", 64)]
    found = {0: _kept("h100", 40 * GIB), 1: _kept("h100", 20 * GIB)}
    rows, by = ranked(cells, Done({**found, 2: _kept("h100", 99 * GIB, "too_large")}), None)
    assert by == "peak_bytes"
    assert [(row.place, row.values["batch-size"]) for row in rows] == [
        (1, "8"),
        (2, "16"),
        (None, "64"),
    ]


def test_throughput_time_and_money_are_those_of_the_whole_job() -> None:
    cells = [_cell("h100", 8, samples=64), _cell("a100-80gb", 8, samples=8)]
    eight = _answer("h100", 2 * GIB, 2.0, world_size=8, host_processes=8)
    one = _kept("a100-80gb", GIB, step=1.0)
    found = {0: Kept(status="fits", fits=True, before=eight), 1: one}
    rows, by = ranked(cells, Done(dict(found)), None)
    assert by == "samples_per_second" and [row.samples_per_second for row in rows] == [32, 8]
    rows, by = ranked(cells, Done(dict(found)), None, samples=100)
    assert by == "seconds" and [row.seconds for row in rows] == [4, 13]
    prices = {"h100": 3.0, "a100-80gb": 1.0}
    rows, by = ranked(cells, Done(dict(found)), None, 100, prices)
    assert by == "cost" and [row.gpu for row in rows] == ["a100-80gb", "h100"]
    assert [row.cost for row in rows] == pytest.approx([13 / 3600, 8 * 3 * 4 / 3600])


def test_of_what_costs_the_same_the_faster_comes_first() -> None:
    cells = [_cell("h100", 8, samples=8), _cell("h100", 8, samples=16)]
    two = _answer("h100", 2 * GIB, 1.0, world_size=2, host_processes=2)
    found = {0: _kept("h100", GIB, step=1.0), 1: Kept(status="fits", fits=True, before=two)}
    rows, by = ranked(cells, Done(dict(found)), None, 160, {"h100": 3.0})
    assert by == "cost" and [(row.gpus, row.seconds) for row in rows] == [(2, 10), (1, 20)]


def test_time_that_a_plan_adds_counts() -> None:
    plan = _kept("h100", 4 * GIB, "fits_with_plan", 4.0, added_fraction=0.5, plan="a.plan")
    plan = msgspec.structs.replace(plan, after=answer_of("h100", GIB))
    rows, _ = ranked([_cell("h100", 1, samples=12)], Done({0: plan}), None)
    assert rows[0].step_seconds == 6 and rows[0].samples_per_second == 2
    assert (rows[0].step_low_seconds, rows[0].step_high_seconds) == (3, 12)
    assert rows[0].high_bytes == GIB and rows[0].added_fraction == 0.5


def test_one_unknown_throughput_is_not_compared_with_a_known_one() -> None:
    cells = [_cell("h100", 1, samples=4), _cell("h100", 2)]
    found = {0: _kept("h100", GIB, step=4.0), 1: _kept("h100", 2 * GIB, step=2.0)}
    rows, by = ranked(cells, Done(dict(found)), None)
    assert by == "step_seconds" and [row.values["batch-size"] for row in rows] == ["2", "1"]


def _sweep(rows: list[Row]) -> Sweep:
    return Sweep(
        memplan_version="0",
        ranked_by="peak_bytes",
        complete=True,
        rows=rows,
        captures=1,
        kept=0,
        seconds=1.0,
        notes=[],
    )


def test_a_table_and_a_csv_have_every_row() -> None:
    cells = [_cell("h100", 8), _cell("h100", 16), _cell("h100", 32)]
    done = Done({0: _kept("h100", GIB), 1: Kept(status="impossible", fits=False, reason="a\x1bb")})
    rows, _ = ranked(cells, done, None)
    said = list(table_lines(_sweep(rows)))
    assert said[0] == "1 of 3 combinations fit; ended early, 1 were not captured"
    assert [line.split()[-1] for line in said[3:6]] == ["fits", "a?b", "done"]
    assert said[-1] == "  best  on h100: train.py"
    read = list(csv.DictReader(io.StringIO(csv_text(_sweep(rows)))))
    assert [row["batch-size"] for row in read] == ["8", "16", "32"]
    assert read[0]["high_bytes"] == str(GIB) and read[1]["high_bytes"] == ""
    assert [row["status"] for row in read] == ["fits", "impossible", "not_done"]


def test_small_figures_keep_their_digits() -> None:
    cells = [_cell("h100", 8, samples=8)]
    done = Done({0: _kept("h100", GIB, step=0.0004)})
    rows, _ = ranked(cells, done, None, samples=80, prices={"h100": 9.0})
    row = list(table_lines(_sweep(rows)))[3]
    assert "0.4 ms (" in row and " 4 ms  1e-05  fits" in row
