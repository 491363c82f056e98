"""A process of its own that plans a recording, so that the job does not wait: a folder with
`trace` in it; writes `plan.0`, `plan.1`, …, one a device, and exits with 0.

Of a job that is running only the round is planned: what it has is where it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from memplan.layout.static_plan import plan_of, static_plan
from memplan.types.errors import MemplanError, NoAnswerError
from memplan.types.plan_file import save_plan
from memplan.types.trace import EventKind
from memplan.types.trace_file import load_trace

_SECONDS = 20.0
"""To search a layout for all devices."""
_NICE = 5


def main(folder: Path) -> int:
    os.nice(_NICE)
    try:
        trace = load_trace(folder / "trace")
        asked = trace.events.kind == EventKind.ALLOC
        devices = np.unique(trace.events.device[asked]).tolist()
        reasons = []
        for device in devices:
            try:
                found = static_plan(
                    trace, seconds=_SECONDS / len(devices), device=device, prologue=False
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
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
