"""What a run writes in the end is written whatever ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import os, signal, sys, time
from pathlib import Path
from memplan.cli.run_signals import finished

def write():
    with Path("written").open("a") as file:
        file.write("begun ")
        if "late" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        file.write("whole ")

with finished(write, also_by_signal=True):
    if "worker" in sys.argv:
        up, begun = os.pipe()
        if os.fork() == 0:
            os.write(begun, b"1")  # Python forgets a signal that comes while a child begins
            time.sleep(600)
            os._exit(0)
        os.read(up, 1)
    if "own" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    if "ignored" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "late" not in sys.argv:
        os.kill(0 if "worker" in sys.argv else os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
"""


@pytest.mark.parametrize(
    ("case", "code"),
    [("", -15), ("late", -15), ("own", 5), ("ignored", 0), ("worker", -15)],
)
def test_a_signal_ends_it_as_ever_once_all_is_written(tmp_path: Path, case: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, case],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,  # a worker that did not end would hold stderr
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert (tmp_path / "written").read_text() == "begun whole "


def test_below_nohup_it_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN.replace("SIGTERM)\n        time", "SIGHUP)\n        time")],
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert done.returncode == 0
    assert (tmp_path / "written").read_text() == "begun whole "
