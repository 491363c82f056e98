"""The GPU order suite: its orchestration with the processes replaced, and its measurements on the
CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_order
from bench.check import read_goals
from bench.gpu_order import JOBS, OPTIMIZERS, Suite, main, summarize
from bench.gpu_order_jobs import measure
from memplan.runtime import nvml

SUITE = gpu_order
GIB = 2**30


class Machine:
    """Stands in for the processes: a card on which ordering saves a tenth."""

    def __init__(self, slow: float = 0.0, failing: str = "", wrong: str = "") -> None:
        self.now, self.slow, self.failing, self.wrong = 0.0, slow, failing, wrong
        self.commands: list[list[str]] = []

    def clock(self) -> float:
        return self.now

    def run(self, command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
        self.commands.append(command)
        self.now += self.slow
        out, job = Path(command[3]), command[command.index("--job") + 1]
        assert env["CUBLAS_WORKSPACE_CONFIG"]
        if job == self.failing:
            return 1, "", "Traceback\nRuntimeError: CUDA error: an illegal memory access"
        limited = "--budget-bytes" in command
        budget = int(command[command.index("--budget-bytes") + 1]) if limited else None
        peak = budget or 9 * GIB
        found = {
            "device_name": "NVIDIA H100 80GB HBM3",
            "budget_bytes": budget,
            "codegen": command[command.index("--codegen") + 1],
            "loss_difference": 1e-7,
            "resident_bytes": 4 * GIB,
            "plain": {"peak_bytes": 10 * GIB, "seconds": 1.0},
            "compiled": {
                "peak_bytes": 11 * GIB if job == self.wrong else peak,
                "promised_bytes": peak,
                "seconds": 1.01,
            },
            "added_fraction": 0.01,
            "identical": job != self.wrong,
        }
        out.write_text(json.dumps(found))
        return 0, "", ""


@pytest.fixture
def saved(results: dict[str, Any]) -> dict[str, Any]:
    one: dict[str, Any] = results.setdefault("gpu_order", {})
    return one


def suite(machine: Machine, work: Path, budget: float = 1e6) -> Suite:
    return Suite(work, budget=budget, run=machine.run, clock=machine.clock)


def test_each_network_is_measured_with_each_optimizer_and_within_a_budget(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    machine = Machine()
    suite(machine, tmp_path).run_all(list(JOBS))
    assert len(machine.commands) == len(JOBS) * (len(OPTIMIZERS) + 2)
    assert saved["jobs"] == saved["not_above_plain"] == len(JOBS) * len(OPTIMIZERS)
    assert saved["budgets"] == len(JOBS)
    assert saved["tasks_done"] == len(machine.commands)
    assert saved["identical"] == saved["exact"] == len(machine.commands) - len(JOBS)
    assert saved["fused"] == saved["fused_not_above_plain"] == len(JOBS)
    assert saved["failed"] == []
    assert saved["slowest_added"] == 0.01
    limited = saved["tasks"]["u-net-adam-budget"]
    assert limited["budget_bytes"] == int((4 + gpu_order.BUDGET_PART * 5) * GIB)


def test_what_fails_is_named_and_the_rest_goes_on(saved: dict[str, Any], tmp_path: Path) -> None:
    machine = Machine(failing="llama-1b", wrong="u-net")
    suite(machine, tmp_path).run_all(list(JOBS))
    assert saved["failed"] == [
        f"llama-1b-{kind}" for kind in ("adam", "adam-inductor", "adamw-fused")
    ]
    assert "illegal memory access" in saved["tasks"]["llama-1b-adam"]["error"]
    assert saved["identical"] == saved["exact"] - 3
    assert saved["not_above_plain"] == saved["jobs"] - 2


def test_out_of_time_is_told(saved: dict[str, Any], tmp_path: Path) -> None:
    suite(Machine(slow=100.0), tmp_path, budget=250.0).run_all(list(JOBS))
    assert saved["tasks_done"] == 3
    assert all(saved["tasks"][name]["error"] == "no time left" for name in saved["failed"])


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvml, "used_bytes", lambda: None)
    assert main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
    assert main(["--dry-run", "--only", "u-net"]) == 0
    assert "--job u-net --optimizer adam" in capsys.readouterr().out


def test_the_goals_ask_for_what_is_told() -> None:
    machine_says = summarize({})
    asked = [goal for goal in read_goals() if goal.result == "gpu_order"]
    assert asked
    told = {*machine_says, "slowest_added", "fused_slowest_added"}
    assert {goal.path for goal in asked} <= told


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_job_is_measured_on_the_cpu(codegen: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    job = ("--job", "gpt2-medium", "--codegen", codegen)
    short = ("--deadline", "1", "--steps", "2")
    code = measure.main([str(out), *job, "--device", "cpu", "--small", *short])
    assert code == 0, out.read_text()
    found = json.loads(out.read_text())
    assert found["identical"] or codegen == "inductor"
    assert found["loss_difference"] < 1e-2
    assert found["repeatable"]
    assert found["compiled_calls"] > 4
    assert found["compiled"]["promised_bytes"] >= found["compiled"]["lower_bound_bytes"]
    kept = found["compiled"]["peak_bytes"] / found["compiled"]["promised_bytes"]
    assert (0.98 if codegen == "eager" else 0.9) < kept < 1.02
