"""`memplan run --watch`: in a terminal of its own, over the library that keeps books alone."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from memplan.cli.app import main
from memplan.cli.run_watch import Memory, Watch, lines_of
from memplan.runtime import nvml
from tests.cli.test_run_planned import folder, run
from tests.terminal import Terminal, plain

__all__ = ["folder"]  # the fixture
GIB = 1 << 30
MEMORY = Memory(
    steps=120,
    allocated=7 * GIB,
    allocated_peak=8 * GIB,
    reserved=9 * GIB,
    reserved_peak=10 * GIB,
    arena=11 * GIB,
    card_used=12 * GIB,
    card_total=24 * GIB,
)


def test_the_job_beside_its_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--record", "job.trace", "train.py") == 0
    assert main(["plan", "-o", "job.plan", "--from-trace", "job.trace"]) == 0
    monkeypatch.setattr(nvml, "used_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(nvml, "total_bytes", lambda: 24 * GIB)
    source = (folder / "train.py").read_text() + "\nprint('the end', file=sys.stderr)\n"
    (folder / "train.py").write_text(source)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal.file)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert run("--watch", "--plan", "job.plan", "train.py") == 0
    text = terminal.text
    shown = plain(text)
    assert "step 6" in shown and "a plan is in effect" in shown
    assert re.search(r"reserved .* KiB, peak .* KiB, planned .* KiB", shown)
    assert "3.0 GiB of 24.0 GiB, all processes" in shown
    assert "\x1b[1;26r" in text, "four lines of thirty do not scroll"
    assert text.rindex("\x1b[r") > text.rindex("\x1b[1;26r"), "in the end all do"
    after = text[text.rindex("\x1b[r") :]
    assert "\x1b[27;1H\x1b[J" in after and "memplan: peak reserved" in after
    assert "the end\r\n" in text


def test_without_a_terminal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--watch", "train.py") == 0
    said = capfd.readouterr().err
    assert "stderr is no terminal, so nothing is shown" in said and "\x1b" not in said


def test_the_terminal_is_given_back_where_a_signal_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal, time\ntime.sleep(1.5)\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    terminal = Terminal()
    done = subprocess.run(
        [sys.executable, "-m", "memplan", "run", "--watch", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=terminal.slave,
        text=True,
        timeout=300,
    )
    text = terminal.text
    assert done.returncode == -15 and done.stdout == ""
    assert "no GPU memory in use" in plain(text)
    assert text.rindex("\x1b[r") > text.rindex("\x1b[1;26r")


def test_what_is_shown() -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    lines = [plain(line).rstrip() for line in lines_of(MEMORY, console)]
    assert lines[0].startswith("memplan") and "step 120" in lines[0]
    assert lines[1].startswith("allocated █") and lines[1].endswith("7.0 GiB, peak 8.0 GiB")
    assert lines[2].endswith("9.0 GiB, peak 10.0 GiB, planned 11.0 GiB")
    assert lines[3].startswith("card") and lines[3].endswith("12.0 GiB of 24.0 GiB, all processes")
    assert lines[3].count("█") == 12  # half of the card
    nothing = [plain(line) for line in lines_of(Memory(), console)]
    assert "no GPU memory in use" in nothing[0] and "–, peak –" in nothing[1]
    narrow = Console(width=30, file=io.StringIO(), force_terminal=True)
    lines = lines_of(replace(MEMORY, steps=10**9), narrow)
    assert len(lines) == 4 and all(len(plain(line)) <= 30 for line in lines)


def test_a_fault_of_ours_does_not_end_the_job() -> None:
    terminal = Terminal()
    said: list[str] = []

    def read() -> Memory:
        raise KeyError("nothing")

    with Watch(read, terminal.slave, said.append) as watch:
        watch._thread.join(10)
    assert said == ["--watch ends: KeyError: 'nothing'"]
    assert "\x1b[r" in terminal.text
