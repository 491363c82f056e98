"""`memplan place`: a trace or an answer in, what to ask a scheduler for out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from memplan.cli import main
from memplan.types.trace_file import save_trace
from tests.placement.answers import GIB, answer_of, trace_of
from tests.schemas import read_answer


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "job.trace"
    save_trace(trace_of("a100-80gb"), path)
    return str(path)


def _answer(folder: Path, high_bytes: int) -> str:
    path = folder / "answer.json"
    path.write_bytes(msgspec.json.encode(answer_of("a100-80gb", high_bytes)))
    return str(path)


def test_a_trace_and_its_answer(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["place", trace]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a100-40gb: ") and "1g.5gb of a100-40gb" in said
    blocks = said.split("\n\n")  # the card, what to ask for, and all notes
    assert len(blocks) == 3 and blocks[2].count("note: ") > 1
    assert main(["place", "--format", "json", _answer(tmp_path, 50 * GIB)]) == 0
    found = read_answer("place", capsys.readouterr().out)
    assert found["fits"] and found["card"]["card"] == "a100-80gb" and found["mig"] is None


def test_exit_codes_say_no_and_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    too_large = _answer(tmp_path, 99 * GIB)
    assert main(["place", too_large]) == 3
    assert "no card of a100-80gb's compute capability holds 99.0 GiB" in capsys.readouterr().out
    assert main(["place", "--format", "json", too_large]) == 3
    assert not read_answer("place", capsys.readouterr().out)["fits"]
    assert main(["place", "--format", "slurm", too_large]) == 3
    assert capsys.readouterr().out == ""
    assert main(["place", "--mig", "--format", "slurm", _answer(tmp_path, 50 * GIB)]) == 3
    assert "no MIG slice" in capsys.readouterr().err


def test_bad_input(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "--queue", "a", trace]) == 2
    assert "--queue with --format text" in capsys.readouterr().err
    assert main(["place", "--format", "kueue", "--queue", "a b", trace]) == 2
    assert "--queue 'a b' is no name" in capsys.readouterr().err
    assert main(["place", "--format", "slrum", trace]) == 2
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert main(["place", str(bad)]) == 2
    assert f"{bad}: neither a trace nor an answer" in capsys.readouterr().err
    assert main(["place", str(tmp_path / "none")]) == 2
