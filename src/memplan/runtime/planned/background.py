"""Plans a recording while the job goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from memplan.types.errors import MemplanError
from memplan.types.plan import Plan
from memplan.types.plan_file import load_plan
from memplan.types.trace import Trace
from memplan.types.trace_file import save_trace

_WORKER = "memplan.runtime.planned.worker"


class Planning:
    """A planner at work in a process of its own (`worker.py`)."""

    def __init__(self, trace: Trace) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="memplan-")
        folder = Path(self._folder.name)
        save_trace(trace, folder / "trace")
        with (folder / "said").open("wb") as said:
            self._process = subprocess.Popen(
                # Safe path: what lies in the job's folder is not ours to import.
                [sys.executable, "-P", "-m", _WORKER, str(folder), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # Ctrl-C is for the job, which may go on after it
            )

    @property
    def done(self) -> bool:
        return self._process.poll() is not None

    def plans(self) -> list[Plan]:
        """What it found, one plan a device. Raises MemplanError with why it found none."""
        folder = Path(self._folder.name)
        if self._process.wait():
            said = (folder / "said").read_text(encoding="utf-8", errors="replace").strip()
            raise MemplanError(said.splitlines()[-1] if said else "the planner ended")
        return [load_plan(path) for path in sorted(folder.glob("plan.*"))]

    def close(self) -> None:
        """End it, if it still runs, and forget what it wrote."""
        if not self.done:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
