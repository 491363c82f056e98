"""Levers that change rounding, on a job of a CPU's size: fitted, then run with the plan."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from memplan.capturing.options import ScriptTarget
from memplan.fit.knobs import find_accumulation
from memplan.types.plan import Argument, ArgumentsPart, Fingerprint, Plan
from memplan.types.plan_file import load_plan, save_plan
from tests import warm

SCRIPT = """
import argparse, os
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
device = os.environ.get("DEVICE", "cuda")
CLASSES, WIDTH, LENGTH = 20_000, 64, 256 if device == "cuda" else 72
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(CLASSES, WIDTH),
    torch.nn.Linear(WIDTH, WIDTH),
    torch.nn.Tanh(),
    torch.nn.Linear(WIDTH, CLASSES, bias=False),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = torch.randint(CLASSES, (16 * 3, LENGTH))
index = 0
for step in range(3):
    total = 0.0
    for _ in range(args.accumulate):
        tokens = data[index : index + args.batch_size].to(device)
        index += args.batch_size
        logits = model(tokens).view(-1, CLASSES)
        loss = F.cross_entropy(logits, tokens.view(-1)) / args.accumulate
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", total, args.batch_size, type(logits).__name__)
"""


def memplan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DEVICE": "cpu" if words[0] == "run" else "cuda"}
    return warm.memplan(folder, *words, env=environment)


def losses(out: str) -> list[tuple[float, int, str]]:
    """Of each step: the loss, the size of a batch, the class of the logits."""
    lines = [line.split()[1:] for line in out.splitlines()]
    return [(float(loss), int(size), kind) for loss, size, kind in lines]


def test_a_loss_in_chunks_and_smaller_batches(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["fit", "--json", "--gpu", "1GiB", "--allow", "rounding", "-o", "job.plan", "train.py"]
    done = memplan(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    kinds = {lever["kind"]: lever for lever in answer["levers"]}
    assert kinds["loss"]["numbers"] == "rounding" and answer["after"]["fits"]
    assert not answer["before"]["fits"] and not answer["exact"]["fits"]
    path = tmp_path / "job.plan"
    changes = [Argument("--batch-size", 4), Argument("--accumulate", 4)]
    plan = msgspec.structs.replace(load_plan(path), arguments=ArgumentsPart(changes=changes))
    save_plan(plan, path, overwrite=True)
    plain = memplan(tmp_path, "run", "train.py")
    planned = memplan(tmp_path, "run", "--plan", "job.plan", "train.py")
    assert plain.returncode == planned.returncode == 0, planned.stderr
    before, after = losses(plain.stdout), losses(planned.stdout)
    assert [how for _, *how in before] == [[16, "Tensor"]] * 3
    assert [how for _, *how in after] == [[4, "Logits"]] * 3
    assert [one[0] for one in after] == pytest.approx([one[0] for one in before], rel=1e-4)


def test_a_plan_for_other_arguments_sets_none() -> None:
    plan = Plan(
        made_from=Fingerprint(command=["train.py", "--bs", "8"]),
        arguments=ArgumentsPart(changes=[Argument("--bs", 2), Argument("--accumulate", 4)]),
    )
    program = ScriptTarget("script", "train.py", ("--bs", "8"))
    assert program.with_arguments(plan).argv == ("--bs", "2", "--accumulate", "4")
    other = ScriptTarget("script", "train.py", ("--bs", "4"))
    assert other.with_arguments(plan) == other


@pytest.mark.parametrize(
    ("source", "argv", "found"),
    [
        ('add_argument("--grad-accum", type=int, default=4)', (), ("--grad-accum", 4)),
        ("", ("--gradient_accumulation_steps=2",), ("--gradient_accumulation_steps", 2)),
        (
            'add_argument("--micro-batches", type=int)',
            ("--micro-batches", "8"),
            ("--micro-batches", 8),
        ),
        (
            "",
            ("trainer.accumulate_grad_batches=3",),
            ("trainer.accumulate_grad_batches", 3),
        ),
        ("", ("accumulate_grad_batches.trainer=3",), None),
        ('add_argument("-g", "--grad-accum", type=int)', ("-g", "4"), ("-g", 4)),
        ('add_argument("--steps", default=4)', (), None),
    ],
)
def test_the_option_that_accumulates(
    tmp_path: Path, source: str, argv: tuple[str, ...], found: tuple[str, int] | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"parser.{source}\n" if source else "")
    option = find_accumulation(ScriptTarget("script", str(path), argv))
    assert (option and (option.option, option.value)) == found
