"""Processes that measure on one card: some together, some alone."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_turns
from bench.results import ROOT

OTHER = """
import sys
from bench import gpu_turns
with getattr(gpu_turns, sys.argv[1])():
    print("in", flush=True)
    sys.stdin.read(1)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_turns.FOLDER, str(tmp_path))


class Other:
    """Another process, which is in until it is told to go."""

    def __init__(self, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def is_in(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "in\n"

    def go(self) -> None:
        self.process.communicate("x")
        assert self.process.returncode == 0


def free(folder: Path, how: int) -> bool:
    """Whether the card could be used like that now."""
    with (folder / "room").open("w") as room:
        try:
            fcntl.flock(room, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_some_share_the_card_and_one_is_alone_on_it(tmp_path: Path) -> None:
    with gpu_turns.together():
        sharing = Other("together")
        sharing.is_in()
        assert free(tmp_path, fcntl.LOCK_SH) and not free(tmp_path, fcntl.LOCK_EX)
        alone = Other("alone")
        sharing.go()
    alone.is_in()
    assert not free(tmp_path, fcntl.LOCK_SH)
    late = Other("together")
    alone.go()
    late.is_in()
    late.go()
    assert free(tmp_path, fcntl.LOCK_EX)
