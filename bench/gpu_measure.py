"""What the processes of the suites `order` and `recompute` share: how a step is measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from memplan.runtime.kernel_cases import cuda_seconds as cuda_seconds

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cuda_peak(step: Callable[[], object]) -> int:
    """Most bytes that PyTorch's allocator has handed out at one time in a step."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def host_seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Inside, kernels give the same bits each time; RuntimeError where PyTorch has no such kernel
    (with `warn_only`, attention keeps its usual one, which has other bits each time)."""
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


def bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's elements read as integers."""
    return int(tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()]).sum())


def process_parser(description: str | None, jobs: Collection[str]) -> argparse.ArgumentParser:
    """The options of every process: `OUT.json --job NAME`, `--device` and `--small` for a try."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path)
    parser.add_argument("--job", choices=sorted(jobs), required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    return parser


def write_measured(options: argparse.Namespace, measure: Callable[[], dict[str, Any]]) -> int:
    """Writes what was measured and on what, or `error`; gives the exit code."""
    try:
        found = measure() | _circumstances(torch.device(options.device))
    except Exception:
        found = {"error": traceback.format_exc()[-2000:]}
    options.out.write_text(json.dumps(found), encoding="utf-8")
    return 1 if "error" in found else 0


def _circumstances(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device_name": device.type, "torch": torch.__version__}
    return {
        "device_name": torch.cuda.get_device_name(),
        "device_total_bytes": torch.cuda.mem_get_info()[1],
        "torch": torch.__version__,
    }
