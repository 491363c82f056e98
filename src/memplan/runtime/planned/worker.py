"""A process of its own that plans a recording, so that the job does not wait: a folder with
`trace` in it; writes `plan.0`, `plan.1`, …, one a device, and exits with 0.

Of a job that is running only the round is planned: what it has is where it is. Where the job ends
before, however it does, so does this process, and the folder goes.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import numpy as np

from memplan.layout.static_plan import plan_of, static_plan
from memplan.types.deadline import Deadline
from memplan.types.errors import MemplanError, NoAnswerError
from memplan.types.plan_file import save_plan
from memplan.types.trace import EventKind
from memplan.types.trace_file import load_trace

_SECONDS = 20.0
"""The longest search for layouts of all devices."""
_NICE = 5
_SECONDS_BETWEEN_LOOKS = 0.5


def main(folder: Path, job: int) -> int:
    """`job`: the number of its process."""
    os.nice(_NICE)
    threading.Thread(target=_end_with, args=(job, folder), daemon=True).start()
    try:
        trace = load_trace(folder / "trace")
        asked = trace.events.kind == EventKind.ALLOC
        devices = np.unique(trace.events.device[asked]).tolist()
        reasons = []
        for device in devices:
            try:
                found = static_plan(
                    trace, seconds=_SECONDS / len(devices), device=device, setup=False
                )
            except NoAnswerError as error:
                reasons.append(error.message)
                continue
            save_plan(plan_of(trace, found), folder / f"plan.{device}")
        if len(reasons) == len(devices):
            raise NoAnswerError(reasons[0] if reasons else "the job asked for no memory")
    except MemplanError as error:
        sys.stderr.write(error.message)
        return error.exit_code
    finally:
        if os.getppid() != job:  # the thread that tidies up ends with this process, half done
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end_with(job: int, folder: Path) -> None:
    """A job that a signal has ended could neither end its planner nor tidy up."""
    Deadline().poll(lambda: os.getppid() != job, _SECONDS_BETWEEN_LOOKS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
