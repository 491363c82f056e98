"""The planner's process: it ends with the job, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memplan.runtime.planned.background import Planning
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Trace, TraceMeta

KILLED = """
import os, signal
from memplan.runtime.planned.background import Planning
from tests.runtime.planned.test_background import job
planning = Planning(job())
os.kill(os.getpid(), signal.SIGKILL)
"""


def job() -> Trace:
    builder = TraceBuilder()
    for builder.step in range(3):
        storages = [builder.new_storage() for _ in range(4)]
        for storage in storages:
            builder.append(EventKind.ALLOC, storage, 1 << 20)
        for storage in storages:
            builder.append(EventKind.FREE, storage)
    builder.append(EventKind.MARK)
    return builder.build(TraceMeta(origin="recording", method="observed"))


def test_what_a_killed_job_leaves_is_tidied_up(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(root)}
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=root, env=environment)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 300
    while list(tmp_path.glob("memplan-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.glob("memplan-*"))


def test_the_folder_goes_though_planning_fails_when_the_job_is_gone(tmp_path: Path) -> None:
    """The thread that waits for the job's end may have removed the recording first."""
    folder = tmp_path / "planned"
    folder.mkdir()
    (folder / "said").touch()
    main = "worker._end_with = lambda *_: None; worker.main(pathlib.Path(sys.argv[1]), 0)"
    source = f"import pathlib, sys; from memplan.runtime.planned import worker; {main}"
    subprocess.run([sys.executable, "-c", source, str(folder)], check=True)
    assert not folder.exists()


def test_an_interrupt_at_the_terminal_is_not_for_the_planner() -> None:
    planning = Planning(job())
    try:
        assert os.getpgid(planning._process.pid) != os.getpgrp()
        assert [plan.allocation is not None for plan in planning.plans()] == [True]
    finally:
        planning.close()
    assert not Path(planning._folder.name).exists()


def test_a_planner_that_is_given_up_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    planning = Planning(job())
    planning.close()
    assert planning.done and not list(tmp_path.iterdir())
