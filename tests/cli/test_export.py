"""`memplan export`: the command around the exporter."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.cli import main
from memplan.types.trace_file import save_trace
from tests.estimation.jobs import training_job


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.trace"
    save_trace(training_job(), path)
    return path


def test_memory_viz(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = job.with_suffix(".pickle")
    words = ["export", "--format", "memory_viz", "-o", str(target), str(job)]
    assert main(words) == 0
    assert str(target) in capfd.readouterr().out
    # Protocol 4, as PyTorch's own viewer expects.
    assert target.read_bytes()[:2] == b"\x80\x04"
    before = target.read_bytes()
    assert main(words) == 2
    assert "exists" in capfd.readouterr().err
    assert target.read_bytes() == before
    assert main([*words, "-f"]) == 0


@pytest.mark.parametrize("kind", ["perfetto", "csv"])
def test_the_others(job: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    target = job.with_suffix(f".{kind}")
    words = ["export", "--format", kind, "-o", str(target), str(job)]
    assert main(words) == 0
    assert str(target) in capfd.readouterr().out
    before = target.read_bytes()
    assert main(words) == 2
    assert target.read_bytes() == before
    assert main([*words, "-f", "--device", "1"]) == 2
    assert "nothing of device 1" in capfd.readouterr().err


def test_no_such_folder(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = job.parent / "no" / "x.pickle"
    assert main(["export", "--format", "memory_viz", "-o", str(target), str(job)]) == 2
    assert "mkdir -p" in capfd.readouterr().err
