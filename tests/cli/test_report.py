"""`memplan report`: what it takes, and what it says of files that it cannot read."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest

from memplan.capturing.importers import pickle_data
from memplan.cli import main
from memplan.estimation import estimate
from memplan.report.memory_viz import memory_viz_snapshot
from memplan.types.device import find_profile
from memplan.types.trace_file import MAGIC, save_trace
from tests.estimation.jobs import training_job


@pytest.fixture
def files(tmp_path: Path) -> Path:
    save_trace(training_job(), tmp_path / "trace")
    (tmp_path / "snapshot").write_bytes(pickle.dumps(memory_viz_snapshot(training_job()), 4))
    (tmp_path / "answer").write_bytes(msgspec.json.encode(estimate(training_job())))
    main(["export", "--format", "csv", "-o", str(tmp_path / "csv"), str(tmp_path / "trace")])
    return tmp_path


@pytest.mark.parametrize("kind", ["trace", "snapshot", "answer", "csv"])
def test_every_kind_of_file(files: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    target = files / "r.html"
    words = ["report", "-o", str(target), str(files / kind)]
    assert main(words) == 0
    assert str(target) in capfd.readouterr().out
    text = target.read_text(encoding="utf-8")
    assert "<h1" in text and "Peak 1" in text
    assert main(words) == 2, "it is there already"
    assert main([*words, "-f"]) == 0


def test_the_card_of_the_verdict(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["report", "-f", "--gpu", "512MiB", "-o", str(files / "r.html")]
    assert main([*words, str(files / "trace")]) == 0
    assert 'class="no">Peak' in (files / "r.html").read_text(encoding="utf-8")
    trace = training_job()
    for name, tone in (("512MiB", "no"), ("rtx4090", "yes"), ("a card of tomorrow", "")):
        trace.meta.gpu = find_profile(name).name if tone else name
        save_trace(trace, files / "trace", overwrite=True)
        assert main([*words[:2], *words[4:], str(files / "trace")]) == 0
        assert f'class="{tone}">Peak' in (files / "r.html").read_text(encoding="utf-8"), name
    assert main([*words, str(files / "answer")]) == 2
    assert "which has a card" in capfd.readouterr().err


def damaged(files: Path) -> dict[str, tuple[bytes, str]]:
    trace, snapshot = ((files / kind).read_bytes() for kind in ("trace", "snapshot"))
    later = MAGIC + (99).to_bytes(2, "little") + trace[len(MAGIC) + 2 :]
    return {
        "a trace of another version": (later, "version 99"),
        "a truncated trace": (trace[: len(trace) // 2], "damaged"),
        "a truncated snapshot": (snapshot[: len(snapshot) // 2], "ends early"),
        "a truncated answer": (b'{"schema_version": 1, "memplan', "truncated"),
        "a plan of another version": (b'{"schema_version": 7, "made_from": {}}', "not a plan"),
        "a page": (b"<html>", "HTML"),
    }


@pytest.mark.parametrize(
    "what",
    [
        "a trace of another version",
        "a truncated trace",
        "a truncated snapshot",
        "a truncated answer",
        "a plan of another version",
        "a page",
    ],
)
def test_bad_input(files: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    content, said = damaged(files)[what]
    (files / "bad").write_bytes(content)
    assert main(["report", "-o", str(files / "r.html"), str(files / "bad")]) == 2
    assert said in capfd.readouterr().err
    assert not (files / "r.html").exists()


def test_a_snapshot_that_is_too_large_is_refused_with_its_size(
    files: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_data, "MAX_FILE_BYTES", 100)
    size = (files / "snapshot").stat().st_size
    assert main(["report", "-o", str(files / "r.html"), str(files / "snapshot")]) == 2
    assert f"{size} bytes" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["trace", "snapshot", "answer", "csv"])
def test_a_file_of_5_gb_is_refused_with_its_size(
    files: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with (files / kind).open("r+b") as file:
        file.truncate(5 << 30)  # of which the disk holds nothing
    assert main(["report", "-o", str(files / "r.html"), str(files / kind)]) == 2
    assert str(5 << 30) in capfd.readouterr().err
