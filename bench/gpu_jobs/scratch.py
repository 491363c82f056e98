"""What kernels ask of the allocator beyond their outputs, operator by operator.

    python scratch.py OUT.json SECONDS

Every case runs twice. Written down for each run: every request of the allocator and whether it
was given back before the operator returned. Libraries' workspaces that stay (cuBLAS) appear in the
first run only. Stops after SECONDS and says how many cases were left.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scratch_cases import Case, convolution_cases, native_cases  # type: ignore[import-not-found]
from torch import Tensor

HISTORY_EVENTS = 20_000


def prepare(case: Case) -> Callable[[], Any]:
    """The arguments made, and for a backward its forward run: what is left to call is measured."""
    arguments = [make() for make in case.makers]
    if not case.backward:
        return lambda: case.call(*arguments)
    wanted = [a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()]
    for tensor in wanted:
        tensor.requires_grad_()
    output = case.call(*arguments)
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)


def observe(call: Callable[[], Any]) -> dict[str, Any]:
    """Every request of one call, `[bytes, given back before it returned]`, and its outputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(
        "all", context=None, max_entries=HISTORY_EVENTS, clear_history=True
    )
    output = call()
    torch.cuda.synchronize()
    entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(None)
    result = {
        "requests": pair_requests(entries),
        "kept_bytes": torch.cuda.memory_allocated() - before,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }
    del output
    return result


def pair_requests(entries: list[dict[str, Any]]) -> list[list[Any]]:
    """`[bytes, given back]` of each allocation in a history."""
    live: dict[int, list[Any]] = {}
    requests: list[list[Any]] = []
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = [entry["size"], False]
            requests.append(live[entry["addr"]])
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            live.pop(entry["addr"])[1] = True
    return requests


def run_case(case: Case) -> dict[str, Any]:
    """One case, twice; an operator that fails is told in words."""
    found: dict[str, Any] = {
        "op": case.op + (" backward" if case.backward else ""),
        "arguments": case.words,
    }
    try:
        call = prepare(case)
        found["first"], found["again"] = observe(call), observe(call)
        if found["first"] == found["again"]:
            del found["first"]
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:200]
    return found


def main(out: str, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    cases = [*native_cases(), *convolution_cases()]
    results: list[dict[str, Any]] = []
    for case in cases:
        if time.monotonic() > deadline:
            break
        results.append(run_case(case))
    result = {
        "device_name": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
        "cases_left": len(cases) - len(results),
        "cases": results,
    }
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
