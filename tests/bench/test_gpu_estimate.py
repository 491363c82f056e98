"""The GPU suite's orchestration with the runs themselves replaced: no GPU, no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_estimate
from bench.divergence import compare_requests
from bench.gpu_estimate import Suite, errors, gpu_argument, main, run_jobs, summarize
from bench.gpu_jobs.jobs import JOBS
from memplan.runtime import nvml

SUITE = gpu_estimate
GIB = 2**30
MEASURED = {
    "error": "",
    "device_name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "device_total_bytes": 80 * GIB,
    "max_memory_allocated": 10 * GIB,
    "max_memory_reserved": 11 * GIB,
}
ANSWER = {
    "allocated_peak_bytes": 10 * GIB,
    "reserved_peak_bytes": int(11.11 * GIB),
    "peak_bytes": 12 * GIB,
    "curve": {},
}


class Machine:
    """Stands in for the processes: `slow` seconds a run, jobs named in `failing` die."""

    def __init__(self, slow: float = 0.0, failing: tuple[str, ...] = ()) -> None:
        self.now = 0.0
        self.slow = slow
        self.failing = failing
        self.commands: list[tuple[list[str], dict[str, str]]] = []

    def clock(self) -> float:
        return self.now

    def run(self, command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
        self.commands.append((command, env))
        self.now += self.slow
        if "memplan" in command:
            return 0, json.dumps(ANSWER), ""
        out = Path(command[3] if command[1] == "-m" else command[2])
        if out.stem in self.failing:
            return 1, "", "Traceback\nRuntimeError: CUDA error: an illegal memory access"
        out.write_text(json.dumps(MEASURED))
        return 0, "", ""


@pytest.fixture
def saved(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(gpu_estimate, "explain", lambda work, name: {})
    return results


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., tuple[Suite, Machine]]:
    def make(budget: float = 450.0, **machine: Any) -> tuple[Suite, Machine]:
        stand_in = Machine(**machine)
        made = Suite(tmp_path, budget=budget, run=stand_in.run, clock=stand_in.clock)
        return made, stand_in

    return make


def test_each_job_is_measured_and_estimated_with_the_same_arguments(
    suite: Callable[..., tuple[Suite, Machine]], saved: dict[str, Any]
) -> None:
    made, machine = suite()
    run_jobs(made, list(JOBS)[:3])
    for name in list(JOBS)[:3]:
        arguments = shlex.split(JOBS[name])
        ran = [(c, e) for c, e in machine.commands if c[-len(arguments) :] == arguments]
        (real, real_env), (estimate, estimate_env) = sorted(ran, key=lambda r: "memplan" in r[0])
        assert real[2] == "memplan.runtime.measure"
        assert real[5] == estimate[estimate.index("-o") + 2]
        assert estimate_env["CUDA_VISIBLE_DEVICES"] == ""
        assert real_env.get("CUDA_VISIBLE_DEVICES") != ""
        assert estimate[estimate.index("--gpu") + 1] == "h100"
    data = saved["gpu_estimate"]
    assert data["job_count"] == 3
    assert data["failed"] == []
    assert data["worst_allocated_error"] == 0
    assert data["worst_reserved_error"] == pytest.approx(0.01)
    assert "curve" not in data["jobs"][next(iter(JOBS))]["estimated"]


def test_a_job_that_dies_leaves_the_others_standing(
    suite: Callable[..., tuple[Suite, Machine]], saved: dict[str, Any]
) -> None:
    names = list(JOBS)[:3]
    made, _ = suite(failing=(names[1],))
    run_jobs(made, names)
    assert saved["gpu_estimate"]["job_count"] == 2
    assert saved["gpu_estimate"]["failed"] == [names[1]]
    assert "illegal memory access" in saved["gpu_estimate"]["jobs"][names[1]]["measured"]["error"]


def test_the_first_job_may_die_before_the_card_is_known(
    suite: Callable[..., tuple[Suite, Machine]], saved: dict[str, Any]
) -> None:
    names = list(JOBS)[:2]
    made, _ = suite(failing=(names[0],))
    run_jobs(made, names)
    assert saved["gpu_estimate"]["failed"] == [names[0]]


def test_nothing_begins_once_the_budget_is_spent(
    suite: Callable[..., tuple[Suite, Machine]], saved: dict[str, Any]
) -> None:
    made, machine = suite(budget=100.0, slow=30.0)
    run_jobs(made, list(JOBS))
    real_runs = [command for command, _ in machine.commands if "memplan" not in command]
    assert len(real_runs) <= 3
    assert set(saved["gpu_estimate"]["jobs"]) == set(JOBS)
    assert saved["gpu_estimate"]["jobs"][list(JOBS)[-1]]["measured"]["error"] == "no time left"
    assert made.measure_scratch() == {"error": "no time left"}


def test_context_and_scratch_tell_what_failed(
    suite: Callable[..., tuple[Suite, Machine]],
) -> None:
    made, machine = suite(failing=("context-EAGER", "scratch"))
    made.measure_context()
    loading = [env["CUDA_MODULE_LOADING"] for _, env in machine.commands]
    assert loading == ["LAZY", "EAGER"]
    assert made.context[0] == {"module_loading": "LAZY", **MEASURED}
    assert "illegal memory access" in made.context[1]["error"]
    assert "illegal memory access" in made.measure_scratch()["error"]


def test_errors_are_relative_to_what_was_measured() -> None:
    found = errors({**MEASURED, "nvml_peak_bytes": 10 * GIB}, ANSWER)
    assert found == pytest.approx({"allocated": 0.0, "reserved": 0.01, "process": 0.2})
    assert "process" not in errors(MEASURED, ANSWER)


def test_a_card_without_a_profile_is_given_by_its_size() -> None:
    assert gpu_argument(MEASURED) == "h100"
    unknown = {**MEASURED, "device_name": "NVIDIA Imaginary 9000"}
    assert gpu_argument(unknown) == "80.00GiB:sm90"


def test_summary_counts_only_what_was_compared() -> None:
    jobs: dict[str, dict[str, Any]] = {
        "good": {"errors": {"allocated": -0.02}},
        "bad": {"measured": {"error": "x"}},
    }
    assert summarize(jobs) == {
        "job_count": 1,
        "worst_allocated_error": 0.02,
        "median_allocated_error": 0.02,
        "failed": ["bad"],
    }


def test_first_difference_and_surplus_sizes() -> None:
    real = [(512, "mul", "a.py:1", "observed"), (4096, "conv", "a.py:2", "observed")] * 2
    foreseen = [real[0], (512, "conv", "a.py:2", "observed"), *real[2:]]
    found = compare_requests(real, foreseen)
    assert found["first_difference"] == 1
    assert found["missing"] == [
        {"bytes": 4096, "times": 1, "places": [["conv", "a.py:2", "observed", 2]]}
    ]
    assert found["invented"][0]["bytes"] == 512
    assert compare_requests(real, real)["first_difference"] is None
    assert compare_requests(real, real[:3])["first_difference"] == 3


def test_every_job_says_what_it_covers() -> None:
    lines = " ".join(JOBS.values())
    models = ["gpt2", "llama", "bert", "vit", "resnet50", "convnext", "unet"]
    precisions = ["amp-fp16", "amp-bf16", "bf16"]
    optimizers = ["sgd", "adamw", "adamw-fused"]
    kernels = ["flash", "efficient", "math", "cudnn"]
    for option, values in {
        "--model": models,
        "--precision": precisions,
        "--optimizer": optimizers,
        "--sdpa": kernels,
    }.items():
        assert {v for v in values if f"{option} {v}" not in lines} == set()
    for option in ("--checkpoint", "--accumulate", "--dropout", "--mask", "--clip"):
        assert option in lines
    assert len(JOBS) >= 12


def test_dry_run_and_a_machine_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--dry-run", "--only", "unet"]) == 0
    assert capsys.readouterr().out.count("--model unet") == 2
    monkeypatch.setattr(nvml, "used_bytes", lambda: None)
    assert main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
