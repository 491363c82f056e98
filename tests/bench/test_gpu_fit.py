"""The GPU suite of levers: its orchestration with the processes replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_fit, gpu_fit_steps
from bench.gpu_fit import LEVERS, Suite, main, summarize
from memplan.runtime import nvml
from memplan.types.plan import Plan, StatePart
from memplan.types.plan_file import load_plan, save_plan
from memplan.types.trace_file import save_trace
from tests.capturing.jobs import record
from tests.phases.step_jobs import JOBS

GIB = 2**30


class Machine:
    """Stands in for the processes: a card that does what is promised, in 10 ms more a lever."""

    def __init__(self, failing: str = "none") -> None:
        self.failing = failing
        self.plans: set[tuple[str, ...]] = set()

    def run(self, command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
        steps = "bench.gpu_fit_steps" in command
        path = command[command.index("--plan") + 1] if not steps else command[-1]
        path = path if not steps else next(word for word in command if word.endswith(".plan"))
        plan = load_plan(path)
        parts = tuple(
            n for n in ("recompute", "offload", "state", "step", "loss") if getattr(plan, n)
        )
        self.plans.add(parts)
        if self.failing in parts:
            return 1, "", "Traceback\nRuntimeError: CUDA error"
        if steps:
            out = Path(next(word for word in command if word.endswith(".json")))
            found = {"seconds": 0.1 + 0.01 * len(parts), "allocated_peak_bytes": 2 * GIB}
            out.write_text(json.dumps(found | {"weights": 7, "notes": []}))
            return 0, "", ""
        if "-o" in command:
            save_trace(record(JOBS["attention"]), Path(command[command.index("-o") + 1]))
        answer = {"allocated_peak_bytes": 2 * GIB, "host_peak_bytes": GIB, "notes": []}
        return 0, json.dumps(answer), ""


def test_every_lever_is_promised_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(gpu_fit, "write_result", lambda _name, result: written.append(result))
    monkeypatch.setattr(gpu_fit, "LEAST_BYTES", 1)
    monkeypatch.setattr(gpu_fit, "SEARCH_SECONDS", 0.5)
    machine = Machine()
    suite = Suite(tmp_path, run=machine.run)
    suite.each(["gpt2-fp32-adamw"], suite.run_job, suite.save)
    assert machine.plans >= {(), ("offload",), ("state",)}
    rows = summarize(suite.jobs)["levers"]
    assert {row["lever"] for row in rows} >= {"plain", "offload-all", "offload-half", "state"}
    assert all(row["peak_error"] == 0 and row["same_bits"] for row in rows)
    assert all(row["added_seconds"] >= 0.0099 for row in rows if row["lever"] != "plain")
    assert written[-1]["levers"] == rows


def test_what_fails_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_fit, "write_result", lambda _name, _result: None)
    monkeypatch.setattr(gpu_fit, "LEVERS", {n: LEVERS[n] for n in ("state", "offload-all")})
    monkeypatch.setattr(gpu_fit, "LEAST_BYTES", 1)
    suite = Suite(tmp_path, run=Machine("state").run)
    suite.run_job("gpt2-fp32-adamw")
    assert {row["lever"] for row in summarize(suite.jobs)["levers"]} == {"plain", "offload-all"}
    assert "failed: RuntimeError: CUDA error" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "used_bytes", lambda: None)
    assert main([]) == 2
    assert main(["--dry-run"]) == 0


SCRIPT = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range({}):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("steps", [100, 3])
def test_a_script_is_ended_after_its_steps(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("synchronize", "reset_peak_memory_stats", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    script, plan, out = tmp_path / "train.py", tmp_path / "job.plan", tmp_path / "out.json"
    script.write_text(SCRIPT.format(steps))
    save_plan(Plan(memplan_version="0", state=StatePart(share=1.0)), plan)
    code = gpu_fit_steps.main([str(out), str(plan), str(script)])
    found = json.loads(out.read_text())
    assert code == (1 if steps == 3 else 0)
    assert found.get("error") == ("the script made 3 steps" if steps == 3 else None)
    assert steps == 3 or (found["seconds"] > 0 and found["weights"])
