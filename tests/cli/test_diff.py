"""`memplan diff`: what it reads and in which forms it answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from memplan.cli import main
from memplan.estimation import estimate
from memplan.types.trace_file import save_trace
from tests.estimation.test_difference import layers
from tests.schemas import read_answer


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[str, str]:
    """A trace, and the answer of a job that keeps 32 MiB more."""
    trace, answer = tmp_path / "a.trace", tmp_path / "b.json"
    save_trace(layers(), trace)
    answer.write_bytes(msgspec.json.encode(estimate(layers(activation=48))))
    return str(trace), str(answer)


def test_text(jobs: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *jobs]) == 0
    said = capfd.readouterr().out
    assert said.startswith("peak +32 MiB (+")
    assert all(name in said for name in ("activations", "Model.blocks.*.mlp", "train.py:20"))


def test_json(jobs: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--json", *jobs]) == 0
    answer = read_answer("diff", capfd.readouterr().out)
    assert answer["schema_version"] == 1
    assert answer["change_bytes"] == 32 << 20
    assert answer["before"]["file"] == jobs[0]
    assert min(answer["attributed"].values()) >= 0.95


def test_markdown(jobs: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--format", "markdown", *jobs]) == 0
    said = capfd.readouterr().out
    assert said.startswith("**GPU memory: peak +32 MiB")
    assert "| <code>activations</code> | 64 MiB | 96 MiB | +32 MiB |" in said
    assert main(["diff", "--format", "markdown", "--json", *jobs]) == 2


def test_html(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer = tmp_path / "b.json"
    answer.write_bytes(msgspec.json.encode(estimate(layers(48, module="M.<img src=x>{}"))))
    assert main(["diff", "--format", "html", str(answer), str(answer)]) == 0
    assert "Peak unchanged" in capfd.readouterr().out
    save_trace(layers(), tmp_path / "a.trace")
    assert main(["diff", "--format", "html", str(tmp_path / "a.trace"), str(answer)]) == 0
    said = capfd.readouterr().out
    assert "<h2>Change by module</h2>" in said
    assert "M.&lt;img src=x&gt;" in said
    assert "<img" not in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}', "no answer of memplan's"),
        (b'{"schema_version": 9, "memplan_version": "9", "notes": []}', "of version 9"),
        (
            b'{"schema_version": 1, "memplan_version": "1", "notes": []}',
            "not an answer of memplan's",
        ),
        (b'{"schema_version": 1, "memp', "truncated"),
        (b"\x80\x04}q", "pickle data was truncated"),
        (b"", "is empty"),
    ],
)
def test_what_is_no_answer(
    jobs: tuple[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    content: bytes,
    said: str,
) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(content)
    assert main(["diff", jobs[0], str(bad)]) == 2
    assert said in capfd.readouterr().err
