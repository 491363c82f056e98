"""Processes of a sweep."""

from __future__ import annotations

import os
import subprocess
import sys
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
