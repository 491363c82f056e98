"""`memplan layout`: a problem in, a layout and what is proved of it out."""

from __future__ import annotations

import csv
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from memplan import _native
from memplan.cli import main
from memplan.layout.problem_file import read_problem
from tests.oracles.layout_fault import validate
from tests.schemas import read_answer

TIGHT = "id,lower,upper,size\na,0,4,6\nb,2,8,4\nc,4,9,6\nd,8,9,4\n"


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.csv"
    path.write_text(TIGHT)
    return path


def test_the_least_height(problem: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = problem.with_name("out.csv")
    assert main(["layout", "--json", "-o", str(out), str(problem)]) == 0
    answer = read_answer("layout", capfd.readouterr().out)
    assert answer["height_bytes"] == answer["lower_bound_bytes"] == 10
    assert answer["optimal"] is True and answer["status"] == "solved" and answer["seconds"] >= 0
    assert answer["schema_version"] == 1 and answer["memplan_version"]
    placed = read_problem(out)
    assert validate(read_problem(problem), placed.fixed, 10) == ""
    with out.open() as file:
        assert next(csv.reader(file)) == ["id", "lower", "upper", "size", "offset"]
    assert main(["layout", "-o", str(out), str(problem)]) == 2
    assert "-f" in capfd.readouterr().err
    assert main(["layout", "-f", "-o", str(out), str(problem)]) == 0
    first = capfd.readouterr().out.splitlines()[0]
    assert first.startswith("height 10 B: the least possible (4 buffers")


def test_a_capacity(problem: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "--capacity", "12", str(problem)]) == 0
    assert capfd.readouterr().out.startswith("yes: height 1")
    assert main(["layout", "--capacity", "9", str(problem)]) == 3
    said = capfd.readouterr().out
    assert said.startswith("no: ") and "at least 10 B" in said and "bytes over [" in said
    assert main(["layout", "--capacity", "9", "--json", str(problem)]) == 3
    answer = read_answer("layout", capfd.readouterr().out)
    assert answer["status"] == "infeasible" and answer["height_bytes"] is None
    rows = {"a": 6, "b": 4, "c": 6, "d": 4}
    assert sum(rows[name] for name in answer["cannot_fit"]) > 9


def test_bad_input(tmp_path: Path, problem: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_text(TIGHT + "e,5,5,1\n")
    for words, says in (
        ([str(broken)], "row 5 (line 6): lower 5 is not below upper 5"),
        ([str(tmp_path / "none.csv")], "does not exist"),
        (["--capacity", "much", str(problem)], "much"),
        (["--timeout", "-1", str(problem)], "seconds"),
        (["-o", str(problem), "-f", str(problem)], "reads"),
    ):
        assert main(["layout", *words]) == 2
        out, err = capfd.readouterr()
        assert out == "" and says in err and "Traceback" not in err


def test_ctrl_c_gives_the_best_so_far(
    problem: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = _native.pack

    def interrupted(*arguments: Any) -> _native.Packing:
        os.kill(os.getpid(), signal.SIGINT)
        cancel = arguments[-2]
        while not cancel[0]:
            time.sleep(0.01)
        return pack(*arguments)

    monkeypatch.setattr(_native, "pack", interrupted)
    assert main(["layout", "--json", str(problem)]) == 0
    out, err = capfd.readouterr()
    answer = read_answer("layout", out)
    assert answer["status"] in ("cancelled", "solved")
    assert answer["height_bytes"] >= answer["lower_bound_bytes"] >= 10
    assert "the best so far" in err and "Traceback" not in err


def test_a_pipe_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem, pipe = tmp_path / "problem.csv", tmp_path / "pipe"
    problem.write_text("id,lower,upper,size\n0,0,1,8\n")
    os.mkfifo(pipe)
    assert main(["layout", "-f", "-o", str(pipe), str(problem)]) == 2
    assert "is a device or a pipe" in capsys.readouterr().err
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--capacity", ""], "--capacity is empty"),
        (["-o", ""], "--output is empty"),
        (["--capacity", str(1 << 63)], "beyond 2"),
        (["--capacity", "9" * 5000], "beyond 2"),
        (["--capacity", "1.5"], "not a whole number"),
        (["-o", "a" * 300], "cannot be a file: File name too long"),
        (["-o", "a\0b"], "cannot be a file"),
    ],
)
def test_values_that_cannot_be(
    problem: Path, words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", *words, str(problem)]) == 2
    assert says in capfd.readouterr().err


def test_bytes_beyond_what_a_float_tells_apart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "large.csv"
    large = (1 << 53) + 1
    path.write_text(f"id,lower,upper,size\na,0,4,{large}\n")
    assert main(["layout", "--capacity", str(large), "--json", str(path)]) == 0
    assert read_answer("layout", capfd.readouterr().out)["lower_bound_bytes"] == large
    assert main(["layout", "--capacity", str(large - 1), str(path)]) == 3
    assert f"at least 8192.0 TiB ({large} B)" in capfd.readouterr().out
    assert main(["layout", "--capacity", str((1 << 63) - 1), str(path)]) == 0


def test_there_is_a_layout_however_short_the_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "many.csv", tmp_path / "out.csv"
    rows = [f"{i},{i % 97},{i % 97 + 1 + i % 31},{1 + i * 7919 % 1000}" for i in range(3000)]
    path.write_text("\n".join(["id,lower,upper,size", *rows]))
    words = ["layout", "--timeout", "1e-9", "-o", str(out), str(path)]
    assert main(words) in (0, 4) and out.exists(), capfd.readouterr().err
    assert validate(read_problem(path), read_problem(out).fixed) == ""


def test_fixed_buffers_that_overlap_are_named_with_their_places(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "clash.csv"
    path.write_text("id,lower,upper,size,offset\na,0,4,100,0\nb,2,5,100,50\nc,0,9,7,\n")
    assert main(["layout", str(path)]) == 3
    out = capfd.readouterr().out
    assert "the fixed buffers overlap" in out
    assert "a: 100 bytes at 0 over [0, 4)" in out and "b: 100 bytes at 50 over [2, 5)" in out
    path.write_text("id,lower,upper,size\na,0,4,100\n")
    assert main(["layout", str(path)]) == 0
    assert capfd.readouterr().out.startswith("height 100 B: the least possible")
