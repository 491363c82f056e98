"""The suite of step times with the runs themselves replaced, and its kernels on the CPU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_time
from bench.gpu_jobs import time_kernels, time_steps
from bench.gpu_jobs.jobs import JOBS
from bench.gpu_time import TimeSuite, run_jobs
from memplan.runtime.kernel_cases import timed_cases
from memplan.types.device import find_profile

SUITE = gpu_time
MEASURED = {
    "error": "",
    "device_name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "device_total_bytes": 80 << 30,
    "step_seconds": 0.1,
}
ANSWER = {
    "step_seconds": 0.11,
    "step_low_seconds": 0.095,
    "step_high_seconds": 0.13,
    "kernel_seconds": {"matrix products": 0.1},
}


class Machine:
    """Stands in for the processes; jobs named in `failing` die."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.failing = failing
        self.commands: list[list[str]] = []

    def run(self, command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
        self.commands.append(command)
        if "memplan" in command:
            return 0, json.dumps(ANSWER), ""
        out = Path(command[3])
        if out.stem in self.failing:
            return 1, "", "Traceback\nRuntimeError: CUDA error"
        out.write_text(json.dumps({"matmul 512": {}} if out.stem == "kernels" else MEASURED))
        return 0, "", ""


def test_steps_are_measured_and_estimated_with_the_same_arguments(
    tmp_path: Path, results: dict[str, Any]
) -> None:
    names = list(JOBS)[:3]
    machine = Machine(failing=(names[1],))
    summary = run_jobs(TimeSuite(tmp_path, run=machine.run), names)
    assert summary == {
        "job_count": 2, "median_error": pytest.approx(0.1), "held": 2, "failed": [names[1]],
    }  # fmt: skip
    data = results["gpu_time"]
    assert data["gpu"] == "h100" and data["kernels"] == {"matmul 512": {}}
    wanted = shlex.split(JOBS[names[0]])
    ran = [c for c in machine.commands if c[-len(wanted) - 2 : -2] == wanted]
    real, estimate = sorted(ran, key=lambda command: "estimate" in command)
    assert real[real.index("--model") :] == estimate[estimate.index("--model") :]
    assert estimate[estimate.index("--gpu") + 1] == "h100"


class Moment:
    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: Moment) -> float:
        return other.at - self.at


def test_the_first_steps_do_not_count() -> None:
    moments = [Moment(at) for at in (0.0, 900.0, 1000.0, 1100.0, 1210.0)]
    assert time_steps.between(moments) == pytest.approx([0.1, 0.11])
    assert time_steps.between(moments[:2]) == []


def test_kernels_are_priced_from_their_arguments() -> None:
    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.float16)

    card = find_profile("a100-80gb")
    found = time_kernels.table(card, timed_cases(make, lambda func, args: 1e-3))
    priced = {name: one["estimated_seconds"] for name, one in found.items() if "error" not in one}
    assert {"matmul 8192", "pointwise", "conv 3x3 nhwc", "layer norm"} <= set(priced)
    assert 3e-3 < priced["matmul 8192"] < 6e-3
    assert priced["conv 3x3 nhwc"] < priced["conv 3x3 nchw"]
    assert priced["pointwise in L2"] < priced["pointwise"] / 20
