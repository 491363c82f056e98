"""Processes of a sweep."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

_SWEEPS = """
from pathlib import Path
from memplan.sweep.execute import LocalProcesses
LocalProcesses(1).run(["waits"], b"", Path("out"))
"""
_WAITS = """
import time
with open("pipe", "w", buffering=1) as told:
    print("began", file=told)
    time.sleep(20)
    print("ran on", file=told)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing else tells of a parent's end")
def test_what_a_sweep_began_ends_with_it_however_it_ends(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(_WAITS)
    os.mkfifo(tmp_path / "pipe")
    path = os.environ | {"PYTHONPATH": str(tmp_path)}
    sweep = subprocess.Popen([sys.executable, "-c", _SWEEPS], cwd=tmp_path, env=path)
    with (tmp_path / "pipe").open() as told:
        assert told.readline() == "began\n"
        sweep.kill()
        sweep.wait()
        assert told.read() == ""


_TIMES_OUT = """
from pathlib import Path
from memplan.sweep import execute
execute._SECONDS_TO_END = 0.1
execute.LocalProcesses(1, 8.0).run(["stays"], b"", Path("out"))
"""
_STAYS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("pipe", "w") as told:
    print("began", file=told, flush=True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=told)
time.sleep(60)
"""


def test_what_does_not_end_is_killed_with_its_own(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(_STAYS)
    os.mkfifo(tmp_path / "pipe")
    path = os.environ | {"PYTHONPATH": str(tmp_path)}
    began = time.monotonic()
    sweep = subprocess.Popen([sys.executable, "-c", _TIMES_OUT], cwd=tmp_path, env=path)
    with (tmp_path / "pipe").open() as told:
        assert told.read() == "began\n"
    assert sweep.wait() == 1 and time.monotonic() - began < 40
