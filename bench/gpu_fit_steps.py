"""A script's steps on a GPU with a plan in effect: `python -m bench.gpu_fit_steps OUT.json PLAN …`.

The script runs unchanged until an optimizer has made STEPS steps. Written: the median time of a
step, the peaks of PyTorch's allocator after the first, what the host holds at most, and the bits
of the weights.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bench import gpu_turns
from bench.gpu_measure import bits
from memplan.capturing.job.run import run_program
from memplan.runtime.in_effect import plan_in_effect
from memplan.types.plan_file import load_plan

STEPS, FIRST = 12, 4
"""So many, of which the first are not timed: the host's memory is locked there."""


class _Enough(BaseException):
    """The steps have been made; no `except Exception` of the script may stop it."""


class Steps:
    """What the steps took, told by the optimizer that makes them."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.weights = 0

    def __call__(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        torch.cuda.synchronize()
        if len(self.ends) == FIRST - 1:
            gpu_turns.be_alone()
        self.ends.append(time.perf_counter())
        if len(self.ends) == 1:
            torch.cuda.reset_peak_memory_stats()
        if len(self.ends) == STEPS:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            self.weights = sum(bits(p) for p in every if p.is_contiguous())
            raise _Enough

    def found(self) -> dict[str, Any]:
        took = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        return {
            "seconds": statistics.median(took[FIRST - 1 :]),
            "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "weights": self.weights,
            "device_name": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Of the script's steps; `error` where it ends before it has made them all."""
    steps, notes = Steps(), list[str]()
    name, *arguments = options.program
    handle = register_optimizer_step_post_hook(steps)
    gpu_turns.share_from_first_use()
    try:
        plan = load_plan(options.plan)
        with plan_in_effect(plan, options.program, lambda _, text: notes.append(text)):
            run_program("script", name, tuple(arguments))
    except _Enough:
        return {**steps.found(), "notes": notes}
    except Exception:
        return {"error": traceback.format_exc()[-2000:], "notes": notes}
    finally:
        handle.remove()
    return {"error": f"the script made {len(steps.ends)} steps", "notes": notes}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("plan")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    found = measure(options)
    options.out.write_text(json.dumps(found), encoding="utf-8")
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
