"""The whole flow on a job of a CPU's size: fit, then run with the plan, measured."""

from __future__ import annotations

import os
from pathlib import Path

from memplan.types.plan_file import load_plan
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "bench/fit_jobs/mlp.py"
SMALL = ["--width", "64", "--blocks", "6", "--batch-size", "8192"]


def memplan(*words: str) -> list[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "MEASURE": "1" if words[0] == "run" else ""}
    done = warm.memplan(ROOT, *words, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_fit_then_run(tmp_path: Path) -> None:
    """Losses are the same bits, and the measured peak is within what the plan promises."""
    path = str(tmp_path / "job.plan")
    answer = memplan("fit", "--gpu", "800MiB", "-o", path, SCRIPT, *SMALL)
    assert answer[0].startswith("fits with a plan: ")
    assert answer[-1] == f"next: memplan run --plan {path} {SCRIPT} {' '.join(SMALL)}"
    plan = load_plan(path)
    assert plan.recompute is not None and plan.recompute.groups
    on_cpu = [SCRIPT, *SMALL, "--device", "cpu"]
    plain, planned = memplan("run", *on_cpu), memplan("run", "--plan", path, *on_cpu)
    losses = [[line for line in lines if line.startswith("loss")] for lines in (plain, planned)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    before, after = (int(lines[-1].removeprefix("peak ")) for lines in (plain, planned))
    assert after <= plan.recompute.peak_bytes < before
