"""The optimizer in backward for real: fitted, planned, and run in processes of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from memplan.types.plan import Fingerprint, OrderPart, Plan
from memplan.types.plan_file import load_plan, save_plan
from tests import warm

JOB = """
import argparse, hashlib, sys
import torch
from torch.multiprocessing.reductions import StorageWeakRef

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--clip", action="store_true")
parser.add_argument("--late", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
width = args.width
layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(24)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
alive = []


def count(gradient):
    alive.append(StorageWeakRef(gradient.untyped_storage()))


if args.device == "cpu":
    for parameter in model.parameters():
        parameter.register_hook(count)
for step in range(4):
    batch = torch.randn(args.batch_size, width, device=args.device)
    labels = torch.randint(0, 10, (args.batch_size,), device=args.device)
    loss = torch.nn.functional.cross_entropy(model(batch), labels)
    loss.backward()
    held = sum(not reference.expired() for reference in alive)
    alive.clear()
    sys.stderr.write(f"held {held}\\n")
    if args.clip or args.late and step == 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print("loss", float(loss.item()).hex())
if args.device == "cpu":
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
"""
WEIGHTS = 50
ON_CPU = ("train.py", "--device", "cpu", "--width", "64")
"""The gradients are as many as those of the fitted job, and take no time."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(JOB)
    return tmp_path


def run(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = warm.run(folder, *words)
    assert done.returncode == code, done.stderr
    return done


def memplan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = warm.memplan(folder, *words)
    assert done.returncode == 0, done.stderr
    return done


def held(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Gradients alive at the end of the backward pass of each step."""
    return [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("held")]


def early_plan(folder: Path, *words: str) -> None:
    part = OrderPart(parameters=WEIGHTS, gradient_bytes=1)
    made_from = Fingerprint(command=["train.py", *words])
    save_plan(Plan(memplan_version="0.1.0", made_from=made_from, order=part), folder / "job.plan")


def test_fit_run_and_plan(job: Path) -> None:
    """A card that the job fits with updates in backward alone; then the same script on the CPU, and
    a plan of its addresses."""
    fitted = memplan(job, "fit", "--gpu", "1150MiB", "-o", "job.plan", "train.py")
    assert fitted.stdout.startswith("fits with a plan: ")
    assert "updates in backward" in fitted.stdout and "50 weights" in fitted.stdout
    plan = load_plan(job / "job.plan")
    assert plan.order is not None and plan.recompute is None
    assert plan.order.parameters == WEIGHTS and plan.order.peak_bytes > 0
    plain = run(job, *ON_CPU)
    planned = run(job, "-m", "memplan", "run", "--plan", "job.plan", *ON_CPU)
    assert planned.stdout == plain.stdout and plain.stdout.count("loss") == 4
    assert held(plain) == [WEIGHTS] * 4 and held(planned) == [WEIGHTS, 0, 0, 0]
    words = ("plan", "--plan", "job.plan", "-o", "placed.plan", "--timeout", "1", "train.py")
    memplan(job, *words)
    placed = load_plan(job / "placed.plan")
    assert placed.order == plan.order and placed.allocation is not None
    assert placed.allocation.load_bytes <= plan.order.peak_bytes


def test_a_job_that_clips(job: Path) -> None:
    words = (*ON_CPU, "--clip")
    early_plan(job, *words[1:])
    plain, planned = (
        run(job, *words),
        run(job, "-m", "memplan", "run", "--plan", "job.plan", *words),
    )
    assert planned.stdout == plain.stdout and held(planned) == [WEIGHTS] * 4
    on_cpu, said = (ln for ln in planned.stderr.splitlines() if ln.startswith("memplan: "))
    assert on_cpu == "memplan: no GPU here; of the plan, in effect on the CPU: order"
    assert "weights are updated by the optimizer's step" in said and "(train.py:38)" in said


def test_a_job_that_clips_too_late(job: Path) -> None:
    """What has been updated cannot be clipped: the job ends with an error, not with other
    numbers."""
    words = (*ON_CPU, "--late")
    early_plan(job, *words[1:])
    planned = run(job, "-m", "memplan", "run", "--plan", "job.plan", *words, code=1)
    assert planned.stdout.count("loss") == 2 and "Traceback" not in planned.stderr
    assert "memplan: error: " in planned.stderr and "already updated" in planned.stderr
    assert 'delete its part "order"' in planned.stderr


def test_a_job_whose_source_reads_gradients(job: Path) -> None:
    """In a branch that its first step does not take."""
    text = JOB.replace(
        "    optimizer.step()\n", "    if step > 9: print(optimizer.grad)\n    optimizer.step()\n"
    )
    (job / "train.py").write_text(text)
    early_plan(job, *ON_CPU[1:])
    planned = run(job, "-m", "memplan", "run", "--plan", "job.plan", *ON_CPU)
    assert held(planned) == [WEIGHTS] * 4 and "train.py:39 reads gradients" in planned.stderr
