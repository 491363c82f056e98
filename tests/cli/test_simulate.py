"""`memplan simulate`: a file in, the replay's figures out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from memplan.cli import main
from memplan.simulate import AllocatorSettings, simulate
from memplan.types.trace_file import save_trace
from tests.estimation.jobs import training_job
from tests.schemas import read_answer


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.trace"
    save_trace(training_job(), path)
    return path


def test_json(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--json", str(job)]) == 0
    out, err = capfd.readouterr()
    answer = read_answer("simulate", out)
    expected = simulate(training_job())
    assert answer["reserved_peak_bytes"] == expected.reserved_peak_bytes
    assert answer["allocated_peak_bytes"] == expected.allocated_peak_bytes
    assert answer["events"] == len(training_job())
    assert answer["segments_logged"] == answer["segments_matched"] == 0
    assert answer["seconds"] >= 0
    assert answer["schema_version"] == 1 and answer["torch_version"] == "2.13.0"
    assert answer["gpu"] is None and err == ""


def test_settings(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    conf = "expandable_segments:True"
    assert main(["simulate", "--json", "--alloc-conf", conf, str(job)]) == 0
    expected = simulate(training_job(), AllocatorSettings.parse(conf))
    assert (
        read_answer("simulate", capfd.readouterr().out)["reserved_peak_bytes"]
        == expected.reserved_peak_bytes
    )


def test_settings_win_key_by_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = training_job()
    meta = msgspec.structs.replace(trace.meta, alloc_conf="expandable_segments:True")
    path = tmp_path / "set.trace"
    save_trace(replace(trace, meta=meta), path)
    for option, conf in (("", "expandable_segments:True"), ("expandable_segments:False", "")):
        words = ["--alloc-conf", option or "garbage_collection_threshold:0.9"]
        assert main(["simulate", "--json", *words, str(path)]) == 0
        expected = simulate(trace, AllocatorSettings.parse(conf)).reserved_peak_bytes
        assert read_answer("simulate", capfd.readouterr().out)["reserved_peak_bytes"] == expected


def test_text(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(job)]) == 0
    reserved = simulate(training_job()).reserved_peak_bytes
    out = capfd.readouterr().out
    assert f"{reserved} B" in out and "segments predicted" in out
    assert "segments logged" not in out and "first difference" not in out


@pytest.mark.parametrize(
    ("limit", "code"),
    [(["--capacity", "100MiB"], 3), (["--capacity", "8GiB"], 0), (["--gpu", "rtx4060"], 0)],
)
def test_a_limit(job: Path, limit: list[str], code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--json", *limit, str(job)]) == code
    answer = read_answer("simulate", capfd.readouterr().out)
    assert (answer["oom_event"] is not None) == (code == 3)
    assert answer["gpu"] == ("rtx4060" if "--gpu" in limit else None)


@pytest.mark.parametrize(
    "words",
    [["--capacity", "lots"], ["--gpu", "l4", "--capacity", "1GiB"], ["--alloc-conf", "nonsense:1"]],
)
def test_bad_options(job: Path, words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words, str(job)]) == 2
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04cos\nsystem\n", b"\x00" * 4096])
def test_a_foreign_file(tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    assert main(["simulate", str(path)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("memplan: error: ") and "Traceback" not in err


def test_a_truncated_trace(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job.write_bytes(job.read_bytes()[:-40])
    assert main(["simulate", str(job)]) == 2
    assert "Traceback" not in capfd.readouterr().err
