"""The goals are read, held to result files, and named when missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import check, results

GOAL = """
[[goal]]
result = "speed"
path = "run.seconds"
compare = "<="
value = 8.0
says = "quick"

[[goal]]
result = "speed"
path = "run.found"
compare = "=="
to = "run.expected"
says = "complete"
"""


def goals_file(folder: Path, text: str = GOAL) -> Path:
    file = folder / "goals.toml"
    file.write_text(text, encoding="utf-8")
    return file


def result_file(folder: Path, **run: object) -> None:
    text = json.dumps({"data": {"run": run}})
    (folder / "speed.json").write_text(text, encoding="utf-8")


def test_met_goals_exit_0(tmp_path: Path) -> None:
    result_file(tmp_path, seconds=8.0, found=3, expected=3)
    assert check.main([str(goals_file(tmp_path)), str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            {"seconds": 8.1, "found": 3, "expected": 3},
            "MISSED  speed         quick (8.1, goal <= 8)",
        ),
        (
            {"seconds": 1, "found": 2, "expected": 3},
            "MISSED  speed         complete (2, goal == 3)",
        ),
        ({"seconds": 1, "found": 3}, "no 'run.expected'"),
        ({"seconds": True, "found": 3, "expected": 3}, "not a number"),
    ],
)
def test_a_missed_goal_is_named(
    run: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file(tmp_path, **run)
    assert check.main([str(goals_file(tmp_path)), str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert said in printed
    assert "1 of 2 goals met" in printed


def test_an_absent_result_misses_its_goals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([str(goals_file(tmp_path)), str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("no speed.json") == 2


@pytest.mark.parametrize("broken", ["{", "[]", '{"data": 3}', "null"])
def test_a_broken_result_misses_its_goals(broken: str, tmp_path: Path) -> None:
    (tmp_path / "speed.json").write_text(broken, encoding="utf-8")
    assert check.main([str(goals_file(tmp_path)), str(tmp_path)]) == 1


def test_a_goal_without_a_bound_is_refused(tmp_path: Path) -> None:
    file = goals_file(tmp_path, GOAL.replace("value = 8.0", ""))
    with pytest.raises(ValueError, match="one of 'value' and 'to'"):
        check.read_goals(file)


def test_the_project_s_goals_are_readable() -> None:
    goals = check.read_goals()
    assert len({(goal.result, goal.path) for goal in goals}) == len(goals)


def test_a_result_carries_its_circumstances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    path = results.write_result("speed", {"run": {"seconds": 1.5}})
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["data"] == {"run": {"seconds": 1.5}}
    assert document["date"].endswith("+00:00")
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["memory_bytes"] > 2**28
    assert document["versions"]["torch"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_a_result_that_cannot_be_compared_is_refused(
    value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="result 'speed'"):
        results.write_result("speed", {"value": value})
    assert not (tmp_path / "speed.json").exists()
