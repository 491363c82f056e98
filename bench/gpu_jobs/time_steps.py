"""The time of a script's steps on this machine's GPU, the script unchanged:

    python -m bench.gpu_jobs.time_steps OUT.json SCRIPT [ARGS…]

A CUDA event is recorded after every step of an optimizer; nothing else is added, so the host runs
ahead as it does without it. The first steps load kernels and are left out.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bench import gpu_turns
from memplan.capturing.job.run import run_program

LEFT_OUT = 3


def between(moments: list[Any]) -> list[float]:
    """Seconds between events, those of the first steps left out."""
    kept = moments[LEFT_OUT - 1 :]
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(kept)]


def main(arguments: list[str]) -> int:
    out, script, *rest = arguments
    moments: list[Any] = []

    def note(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if len(moments) == LEFT_OUT - 1:
            torch.cuda.synchronize()
            gpu_turns.be_alone()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        moments.append(moment)

    register_optimizer_step_post_hook(note)
    gpu_turns.share_from_first_use()
    error = ""
    try:
        run_program("script", script, tuple(rest))
    except SystemExit as left:
        error = f"exit code {left.code}" if left.code else ""
    except Exception:
        error = traceback.format_exc()[-2000:]
    torch.cuda.synchronize()
    steps = between(moments)
    found = {
        "error": error or ("" if steps else "too few steps"),
        "device_name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "device_total_bytes": torch.cuda.mem_get_info()[1],
        "torch": torch.__version__,
        "step_seconds": statistics.median(steps) if steps else None,
        "steps": len(steps),
    }
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 1 if found["error"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
