"""Run a script for real and write down what PyTorch's allocator did.

    python -m memplan.runtime.measure [--steps N] [--plan PLAN] OUT.json SNAPSHOT.pickle [-m] SCRIPT [ARGS…]

The script runs as `__main__`, unchanged; the memory history is on before its first line. With
`--steps` it ends after that many steps of an optimizer. The result is written even when the script
fails (`error` says how).
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from memplan.capturing.job.run import run_program
from memplan.runtime.in_effect import plan_in_effect
from memplan.runtime.nvml import PeakWatch
from memplan.types.plan import Plan
from memplan.types.plan_file import load_plan

HISTORY_EVENTS = 2_000_000


class _Enough(BaseException):
    """The steps asked for have been run; no `except Exception` of the script may stop it."""


def measured(error: str, process_peak: int | None) -> dict[str, Any]:
    """The allocator's peaks of this process, and the device's view of it."""
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return {
        "error": error,
        "device_name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "requested_bytes_peak": stats.get("requested_bytes.all.peak", 0),
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
        "device_used_bytes": total - free,
        **({"nvml_peak_bytes": process_peak} if process_peak is not None else {}),
        "device_total_bytes": total,
    }


def _end_after(steps: int) -> None:
    """End the script once one of its optimizers has made so many steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts: dict[int, int] = {}

    def count(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if counts[id(optimizer)] >= steps:
            raise _Enough

    register_optimizer_step_post_hook(count)


def _run(options: argparse.Namespace) -> str:
    """What went wrong, or nothing."""
    name, *rest = options.program
    plan = load_plan(options.plan) if options.plan else Plan()
    try:
        with plan_in_effect(plan, options.program, lambda _part, _text: None):
            run_program("module" if options.m else "script", name, tuple(rest))
    except _Enough:
        return ""
    except SystemExit as left:
        return f"exit code {left.code}" if left.code else ""
    except Exception:
        return traceback.format_exc()[-2000:]
    return ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="measure")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--plan")
    parser.add_argument("out")
    parser.add_argument("snapshot")
    parser.add_argument("-m", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.steps:
        _end_after(options.steps)
    with PeakWatch() as watch:
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=HISTORY_EVENTS
        )
        error = _run(options)
        torch.cuda.synchronize()
    found = measured(error, watch.peak_bytes)
    Path(options.out).write_text(json.dumps(found), encoding="utf-8")
    torch.cuda.memory._dump_snapshot(options.snapshot)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
