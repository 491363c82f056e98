"""The GPU suite of the planned allocator: its orchestration with the processes replaced, and its
jobs on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_run
from bench.check import judge, read_goals
from bench.gpu_run import GROWN, JOBS, PAIRS, STEPS, Suite, largest, main, paired
from bench.gpu_run_jobs import train
from memplan.runtime import nvml

SUITE = gpu_run
GIB = 2**30
EFFICIENCY = {"native": 0.85, "expandable": 0.95, "planned": 0.995, "captured": 0.99}
ROOM = {"native": 20, "expandable": 24, "captured": 27}
"""The largest batch."""


class Machine:
    """Stands in for the processes: a card where memplan does what it is meant to do."""

    def __init__(self, slow: float = 0.0, failing: str = "", wrong: str = "") -> None:
        self.now, self.slow, self.failing, self.wrong = 0.0, slow, failing, wrong
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []

    def clock(self) -> float:
        return self.now

    def run(self, command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
        self.commands.append(command)
        self.environments.append(env)
        self.now += self.slow
        if self.failing and self.failing in " ".join(command):
            return 125, "", "memplan: a fault"
        for option in ("-o", "--record"):
            if option in command:
                Path(command[command.index(option) + 1]).write_text("here")
        if "plan" in command:
            return 0, "", ""
        mode = "expandable" if env.get(gpu_run.CONF) else "native"
        if "--plan" in command:
            made = Path(command[command.index("--plan") + 1])
            mode = "captured" if self.captured(made) else "planned"
        if "--stats" in command:
            stats = Path(command[command.index("--stats") + 1])
            stats.write_text(json.dumps({"hit_rate": 0.97}))
        words = command[command.index(str(gpu_run.SCRIPT)) + 1 :]
        Path(words[0]).write_text(json.dumps(self.answer(mode, words)))
        return 0, "", ""

    def captured(self, plan: Path) -> bool:
        """Whether a plan was made from the script, and not from a recording."""
        made = next(words for words in self.commands if "plan" in words and str(plan) in words)
        return "--from-trace" not in made

    def answer(self, mode: str, words: list[str]) -> dict[str, Any]:
        batch = int(words[words.index("--batch") + 1]) if "--batch" in words else 0
        if batch > ROOM.get(mode, 0) and batch:
            return {"out_of_memory": True}
        job = words[words.index("--job") + 1]
        other = mode == "planned" and job == self.wrong
        return {
            "losses": ["0x1p+0", "0x1p-1" if other else "0x1p-2"],
            "seconds": [0.1 + 0.0001 * (step % 3) for step in range(STEPS)],
            "tokens_per_step": 4096,
            "allocated_peak_bytes": 8 * GIB,
            "reserved_peak_bytes": int(8 * GIB / EFFICIENCY[mode]),
            "device_name": "NVIDIA H100 80GB HBM3",
        }


def run(tmp_path: Path, machine: Machine, budget: float = 1e6) -> Suite:
    suite = Suite(tmp_path, budget=budget, run=machine.run, clock=machine.clock)
    suite.run_steps(list(JOBS))
    suite.run_batches(list(GROWN))
    return suite


def missed(tmp_path: Path, results: dict[str, Any]) -> list[str]:
    """The goals that the results miss."""
    folder = tmp_path / "results"
    folder.mkdir()
    for name, data in results.items():
        (folder / f"{name}.json").write_text(json.dumps({"data": data}))
    goals = [goal for goal in read_goals() if goal.result in ("gpu_run", "gpu_run_batches")]
    assert {goal.result for goal in goals} == {"gpu_run", "gpu_run_batches"}
    return [goal.says for goal in goals if not judge(goal, folder).met]


def test_a_card_where_all_is_well_meets_every_goal(tmp_path: Path, results: dict[str, Any]) -> None:
    machine = Machine()
    suite = run(tmp_path, machine)
    assert missed(tmp_path, results) == []
    assert suite.batches["moe"]["native"]["batch"] == 20
    assert results["gpu_run"]["jobs_done"] == len(JOBS)
    assert results["gpu_run"]["jobs"]["gpt2"]["step_time"]["pairs"] == PAIRS * (STEPS - 8)
    plans = [env for words, env in zip(machine.commands, machine.environments, strict=True)
             if "plan" in words]  # fmt: skip
    assert plans and all(env["CUDA_VISIBLE_DEVICES"] == "" for env in plans)


def test_other_losses_are_told(tmp_path: Path, results: dict[str, Any]) -> None:
    run(tmp_path, Machine(wrong="moe"))
    assert results["gpu_run"]["same_losses"] == len(JOBS) - 1
    assert len(missed(tmp_path, results)) == 1


def test_what_fails_is_told_and_the_rest_stands(
    tmp_path: Path, results: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, Machine(failing="--record"))
    assert results["gpu_run"]["jobs_done"] == 0
    assert "a fault" in results["gpu_run"]["jobs"]["gpt2"]["runs"]["planned"]["error"]
    assert "efficiency" in results["gpu_run"]["jobs"]["gpt2"]["runs"]["captured"]
    assert "planned failed" in capsys.readouterr().out


def test_nothing_begins_once_the_budget_is_spent(tmp_path: Path, results: dict[str, Any]) -> None:
    machine = Machine(slow=30.0)
    run(tmp_path, machine, budget=400.0)
    assert len(machine.commands) <= 14
    runs = [run for job in results["gpu_run"]["jobs"].values() for run in job["runs"].values()]
    assert sum("error" not in run for run in runs) <= 14
    assert all("no time left" in run["error"] for run in runs if "error" in run)
    assert results["gpu_run_batches"]["jobs"]["moe"]["native"]["error"] == "no time left"


@pytest.mark.parametrize("most", [0, 1, 7, 8, 100, 1000])
def test_the_largest_batch_is_found(most: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= most

    found = largest(fits, first=8)
    assert found <= most <= found + max(1, found // 32)
    assert len(tried) < 16


def test_step_times_are_compared_in_pairs() -> None:
    slow = {"seconds": [9.0] * 8 + [0.2, 0.4, 0.8]}
    fast = {"seconds": [1.0] * 8 + [0.1, 0.2, 0.4]}
    found = paired([(slow, fast), (slow, {"error": "gone"})])
    assert found["pairs"] == 3
    assert found["low"] == pytest.approx(0.5) and found["high"] == pytest.approx(0.5)
    assert paired([(slow, {})]) == {"pairs": 0}


def test_dry_run_and_a_machine_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--dry-run", "--only", "llama"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(nvml, "used_bytes", lambda: None)
    assert main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_the_suites_jobs_are_those_of_the_script() -> None:
    assert set(train.JOBS) == set(JOBS)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Afterwards PyTorch is as before."""
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("job", ["moe", "variable-length"])
def test_a_job_trains_on_the_cpu_with_the_same_losses_each_time(tmp_path: Path, job: str) -> None:
    found = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        train.main([str(out), "--job", job, "--steps", "3", "--device", "cpu", "--small"])
        found.append(json.loads(out.read_text()))
    assert found[0]["losses"] == found[1]["losses"]
    assert len(set(found[0]["losses"])) == 3
