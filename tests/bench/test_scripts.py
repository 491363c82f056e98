"""The bookkeeping of `bench.scripts`: results kept, references held, the page up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import results
from bench.scripts import __main__ as command
from bench.scripts import runner, table
from bench.scripts.case import Case, Reference, Setup
from bench.scripts.suite import cases

GIB = 2**30


def _case(name: str = "one", **more: Any) -> Case:
    return Case(name=name, setup=Setup("s", wheels=()), package="p==1", argv=("a.py",), **more)


def _result(peak: int, **more: Any) -> dict[str, Any]:
    answer = {"peak_bytes": peak, "low_bytes": peak, "high_bytes": 2 * peak, "gpu": "h100"}
    return {**answer, "allocated_peak_bytes": peak, "seconds": 7.4, "complaints": [], **more}


def test_the_page_shows_the_committed_results() -> None:
    text = table.DOCS.read_text(encoding="utf-8")
    assert text == table.page(text, table.table(cases(), table.read()))


def test_a_result_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    command.keep("b", {"peak": 1}, ["a", "b"])
    command.keep("a", {"peak": 2}, ["a", "b"])
    command.keep("b", {"peak": 3}, ["a", "b"])
    data = json.loads((tmp_path / "scripts.json").read_text(encoding="utf-8"))["data"]
    assert data == {"a": {"peak": 2}, "b": {"peak": 3}}
    assert list(data) == ["a", "b"]
    command.keep("b", {"peak": 4}, ["b"])
    assert list(table.read()) == ["b"]


@pytest.mark.parametrize(
    ("peak", "complaints"),
    [
        (10 * GIB, []),
        (11 * GIB - 1, []),
        (8 * GIB, ["published 10,737,418,240"]),
        (5 * GIB, ["at least 6,442,450,944 by arithmetic", "published 10,737,418,240"]),
        (11 * GIB + 1, ["published 10,737,418,240"]),
    ],
)
def test_references(peak: int, complaints: list[str]) -> None:
    case = _case(floor=Reference(6 * GIB, "…"), published=Reference(10 * GIB, "…"))
    found = runner.against_references(case, _result(peak))
    assert len(found) == len(complaints)
    assert all(line.endswith(end) for line, end in zip(found, complaints, strict=True))


def test_rows() -> None:
    declared = [
        _case("good", floor=Reference(GIB, "sum"), published=Reference(2 * GIB, "them")),
        _case("refused", script="words"),
        _case("new"),
        _case("wrong"),
    ]
    found = {
        "good": _result(2 * GIB),
        "refused": {"exit_code": 4, "seconds": 3.0, "complaints": []},
        "wrong": {"complaints": ["a | b"]},
    }
    head, _, good, refused, new, wrong = table.table(declared, found)
    assert head.count("|") == good.count("|") == wrong.count("|") == len(table.HEAD) + 1
    assert "2.0 GiB (2.0–4.0) of h100 | ≥ 1.0 GiB: sum. 2.15 GB allocated: them; answered" in good
    assert good.endswith("2.15 GB (+0.0 %) | 7 |")
    assert "words" in refused and "exit code 4" in refused
    assert "not measured" in new and "`a.py`" in new
    assert "**not as it should be**: a / b" in wrong
