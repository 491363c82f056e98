"""Completion, as the shell that is here does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.cli.app import COMMANDS


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "memplan.bash"
    with file.open("w") as stdout:
        subprocess.run(
            [sys.executable, "-m", "memplan", "completion", "bash"], stdout=stdout, check=True
        )
    return file


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("est", ["estimate"]),
        ("estimate --gpu rtx40", ["rtx4060", "rtx4090"]),
        ("fit --fron", ["--frontier"]),
        ("diff --format m", ["markdown"]),
        ("estimate --gpu h100 tra", ["train.py"]),
        ("report -o page.html jo", ["job.trace"]),
        ("sweep --gpu h100 --vary lr=1 -o ans", ["answers"]),
    ],
)
def test_bash_completes(script: Path, tmp_path: Path, words: str, completed: list[str]) -> None:
    for name in ("train.py", "job.trace"):
        (tmp_path / name).touch()
    (tmp_path / "answers").mkdir()
    code = (
        'source "$0"; COMP_WORDS=(memplan $1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n'
        '_shtab_memplan; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code, str(script), words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == completed, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_know_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS) and "rtx4090" in text


def test_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'memplan[completion]'" in capsys.readouterr().err
