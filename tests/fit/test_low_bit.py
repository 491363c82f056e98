"""Optimizer state in 8 bits, on a job of a CPU's size: fitted, then run with the plan, compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.types.plan_file import load_plan
from tests.fit.test_with_rounding import memplan

SCRIPT = """
import os
import torch

device = os.environ.get("DEVICE", "cuda")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 6)
data = torch.randn(8, 2048, generator=torch.Generator().manual_seed(1))
for step in range(6):
    x = data.to(device)
    loss = torch.nn.functional.mse_loss(model(x), x.roll(1, 1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print("loss", loss.item())
if device == "cpu":
    state = [one for state in optimizer.state.values() for one in state.values() if one.dim()]
    parts = [getattr(one, name, None) for one in state for name in ("codes", "scale", "qmap")]
    plain = [one for one in state if not hasattr(one, "codes")]
    print("state", sum(one.nbytes for one in [*plain, *parts] if one is not None))
"""


def figures(out: str) -> tuple[list[float], int]:
    """The losses, and the bytes of the optimizer's state."""
    *lines, last = out.splitlines()
    return [float(line.split()[1]) for line in lines], int(last.split()[1])


def test_the_state_takes_what_the_plan_promises_and_the_loss_falls(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--json", "--gpu", "980MiB", "--host-memory", "1MiB", "--allow", "numbers"]
    done = memplan(tmp_path, "fit", *words, "-o", "job.plan", "train.py")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    [lever] = [one for one in answer["levers"] if one["numbers"] != "exact"]
    assert (lever["kind"], lever["numbers"]) == ("low_bit", "numbers"), answer["levers"]
    assert not answer["before"]["fits"] and answer["after"]["fits"]
    part = load_plan(tmp_path / "job.plan").low_bit
    assert part is not None and part.peak_bytes == answer["after"]["allocated_peak_bytes"]
    runs = [memplan(tmp_path, "run", *plan, "train.py") for plan in ([], ["--plan", "job.plan"])]
    assert all(run.returncode == 0 for run in runs), runs[1].stderr
    (plain, whole), (found, state) = (figures(run.stdout) for run in runs)
    assert state == pytest.approx(part.state_bytes, rel=0.02) and state < 0.27 * whole
    assert found[-1] < 0.4 * found[0] and found[-1] == pytest.approx(plain[-1], rel=0.1)
