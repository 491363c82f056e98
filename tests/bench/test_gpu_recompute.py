"""The GPU recompute suite: its orchestration with the processes replaced, and its measurements on
the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_recompute
from bench.check import read_goals
from bench.gpu_recompute import BUDGETS, FRACTIONS, JOBS, Suite, main, planned, summarize
from bench.gpu_recompute_jobs import measure, models
from memplan.runtime import nvml

SUITE = gpu_recompute
GIB = 2**30
LEAST, PLAIN, PER_BLOCK = 4 * GIB, 12 * GIB, 6 * GIB
CPU = torch.device("cpu")


def step(peak: int, seconds: float) -> dict[str, Any]:
    return {"peak_bytes": peak, "seconds": seconds}


class Machine:
    """Stands in for the processes: a card that does what is promised, but for jobs in `wrong`."""

    def __init__(self, slow: float = 0.0, failing: tuple[str, ...] = (), wrong: str = "") -> None:
        self.now, self.slow, self.failing, self.wrong = 0.0, slow, failing, wrong
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []

    def clock(self) -> float:
        return self.now

    def run(self, command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
        self.commands.append(command)
        self.environments.append(env)
        self.now += self.slow
        out, kind, job = Path(command[3]), command[4], command[command.index("--job") + 1]
        if kind in self.failing or f"{job} {kind}" in self.failing:
            return 1, "", "Traceback\nRuntimeError: CUDA error: an illegal memory access"
        out.write_text(json.dumps(self.answer(command, kind, job == self.wrong)))
        return 0, "", ""

    def answer(self, command: list[str], kind: str, wrong: bool) -> dict[str, Any]:
        if kind == "reference":
            promised = {"peak_bytes": LEAST, "plain_peak_bytes": PLAIN, "added_fraction": 0.3}
            return {
                "device_name": "NVIDIA H100 80GB HBM3",
                "plain": step(PLAIN, 1.0),
                "per_block": step(PER_BLOCK, 1.3),
                "least": {**step(LEAST, 1.3), "promised": promised},
            }
        if kind == "pytorch":
            return step(PLAIN, 0.8)
        budget = int(command[command.index("--bytes") + 1])
        found = {
            "budget_bytes": budget,
            "promised": {"peak_bytes": budget, "added_fraction": 0.1},
            "planned": step(budget + (1 if wrong else 0), 1.1),
            "plain": step(PLAIN, 1.0),
            "identical": not wrong,
            "added_fraction": 0.18 if wrong else 0.1,
        }
        return found | ({"per_block": step(PER_BLOCK, 1.3)} if "--per-block" in command else {})


@pytest.fixture
def saved(results: dict[str, Any]) -> dict[str, Any]:
    one: dict[str, Any] = results.setdefault("gpu_recompute", {})
    return one


def run(tmp_path: Path, budget: float = 450.0, **how: Any) -> Machine:
    machine = Machine(**how)
    Suite(tmp_path, budget=budget, run=machine.run, clock=machine.clock, at_once=1).run_all(
        list(JOBS)
    )
    return machine


def test_a_card_that_keeps_every_promise_meets_every_goal(
    tmp_path: Path, saved: dict[str, Any]
) -> None:
    machine = run(tmp_path)
    assert saved["points"] == saved["points_wanted"] == len(JOBS) * len(BUDGETS) == 16
    assert saved["points_within_budget"] == 16
    assert saved["plans"] == saved["plans_identical"] == 20
    assert saved["least_faster_than_per_block"] == pytest.approx(1 - 1.1 / 1.3)
    assert saved["device_name"] == "NVIDIA H100 80GB HBM3"
    assert all(len(job["pytorch"]) == len(FRACTIONS) for job in saved["jobs"].values())
    assert len({command[3] for command in machine.commands}) == len(machine.commands)
    assert all(env["CUBLAS_WORKSPACE_CONFIG"] for env in machine.environments)
    from bench.check import judge

    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "gpu_recompute.json").write_text(json.dumps({"data": saved}))
    goals = [goal for goal in read_goals() if goal.result == "gpu_recompute"]
    assert goals
    assert [goal.says for goal in goals if not judge(goal, folder).met] == []


def test_a_promise_that_is_not_kept_is_counted(tmp_path: Path, saved: dict[str, Any]) -> None:
    run(tmp_path, wrong="u-net")
    assert saved["points_within_budget"] == 12
    assert saved["plans_identical"] == 15
    assert saved["worst_added_error"] == pytest.approx(0.08)
    assert saved["faster_count"] == 3  # the U-Net's plan peaks above per-block checkpointing


def test_what_fails_is_told_and_the_rest_stands(tmp_path: Path, saved: dict[str, Any]) -> None:
    run(tmp_path, failing=("pytorch", "llama-1b reference"))
    assert saved["job_count"] == 3
    assert saved["points"] == 12
    assert saved["pytorch_failed"] == sorted(JOBS)
    assert "illegal memory access" in saved["jobs"]["llama-1b"]["reference"]["error"]


def test_nothing_begins_once_the_budget_is_spent(tmp_path: Path, saved: dict[str, Any]) -> None:
    machine = run(tmp_path, budget=100.0, slow=30.0)
    assert len(machine.commands) == 3
    assert saved["jobs"]["u-net"]["reference"]["error"] == "no time left"


def test_budgets_lie_between_the_least_and_the_plain_peak() -> None:
    tasks = planned("u-net", Machine().answer([], "reference", False))
    sizes = [int(task.arguments[-1]) for task in tasks]
    assert sizes[0] == PER_BLOCK and tasks[0].kind == "equal"
    assert LEAST < sizes[1] < sizes[2] < sizes[3] < sizes[4] < PLAIN


def test_an_empty_run_has_a_summary() -> None:
    assert summarize({"u-net": {"points": [], "pytorch": []}})["points"] == 0


def test_dry_run_and_a_machine_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--dry-run", "--only", "net"]) == 0
    assert capsys.readouterr().out.count("bench.gpu_recompute_jobs.measure") == 2
    monkeypatch.setattr(nvml, "used_bytes", lambda: None)
    assert main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_the_suites_jobs_are_the_models() -> None:
    assert tuple(models.JOBS) == JOBS


# What the processes do, on the CPU


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UP", 1)
    monkeypatch.setattr(measure, "STEPS", 1)
    monkeypatch.setattr(measure, "TRAINED", 2)


def perform(tmp_path: Path, task: str, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    common = ("--device", "cpu", "--small")
    measure.main([str(out), task, *arguments, *common])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.usefixtures("few")
def test_a_reference_and_a_budget(tmp_path: Path) -> None:
    job = ("--job", "llama-1b")
    found = perform(tmp_path, "reference", *job)
    assert "error" not in found, found
    promised = found["least"]["promised"]
    assert found["per_block"]["peak_bytes"] < found["plain"]["peak_bytes"]
    assert found["least"]["peak_bytes"] <= 1.02 * promised["peak_bytes"]
    assert promised["peak_bytes"] < promised["plain_peak_bytes"]
    budget = (promised["peak_bytes"] + promised["plain_peak_bytes"]) // 2
    point = perform(tmp_path, "budget", *job, "--per-block", "--bytes", str(budget))
    assert "error" not in point, point
    assert point["promised"]["peak_bytes"] <= budget
    assert point["planned"]["peak_bytes"] < point["plain"]["peak_bytes"]
    assert point["identical"] and point["repeatable"]
    assert point["per_block"]["peak_bytes"] < point["plain"]["peak_bytes"]


@pytest.mark.usefixtures("few")
def test_other_gradients_are_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = measure.Task(
        measure.parser().parse_args(
            ["-", "budget", "--job", "llama-1b", "--device", "cpu", "--small"]
        )
    )
    state = {name: t.clone() for name, t in task.training.module.state_dict().items()}
    right = task.trajectory(state)
    assert right == task.trajectory(state)
    monkeypatch.setattr(measure, "LEARNING_RATE", 2e-3)  # as if gradients were twice as large
    assert right != task.trajectory(state)


def test_pytorch_failing_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_function: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    found = perform(tmp_path, "pytorch", "--job", "llama-1b", "--fraction", "0.5")
    assert "no compiler here" in found["error"]


@pytest.mark.parametrize("name", [name for name in JOBS if name != "u-net"])
def test_per_block_checkpointing_changes_no_loss_and_no_gradient(name: str) -> None:
    def gradients(training: models.Training) -> list[Any]:
        torch.manual_seed(0)
        loss = training.step().item()
        return [loss, *(p.grad.clone() for p in training.module.parameters())]  # type: ignore[union-attr]

    training = models.build(name, CPU, small=True)
    assert training.blocks
    plain = gradients(training)
    with models.checkpointed(training.blocks):
        again = gradients(training)
    assert plain[0] == again[0]
    assert all(map(torch.equal, plain[1:], again[1:]))
    assert all("forward" not in vars(block) for block in training.blocks)


def test_full_sizes_are_those_that_their_names_say() -> None:
    millions = {"gpt2-medium": 355, "llama-1b": 1100, "resnet-50": 25.6, "u-net": 31}
    for name, wanted in millions.items():
        with torch.device("meta"):
            training = models.JOBS[name](torch.device("meta"), False)
        count = sum(p.numel() for p in training.module.parameters())
        assert count / 1e6 == pytest.approx(wanted, rel=0.02), name
