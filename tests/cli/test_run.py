"""`memplan run`: a script with a plan in effect behaves as Python would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from memplan.types.plan import (
    Fingerprint,
    FrozenPart,
    OpOutput,
    Plan,
    RecomputeGroup,
    RecomputePart,
    StatePart,
)
from memplan.types.plan_file import save_plan
from tests import warm

JOB = """
import sys
import torch
torch.manual_seed(0)
body = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(),
                           torch.nn.Dropout(0.3), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(body.parameters())
criterion = torch.nn.CrossEntropyLoss()
for step in range(4):
    for micro in range(2):
        loss = criterion(body(torch.randn(16, 8)), torch.arange(16) % 2)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex(), body[1].num_batches_tracked.item())
print(sys.argv[1:], __name__)
if "fail" in sys.argv:
    raise ValueError("on purpose")
if "leave" in sys.argv:
    sys.exit(7)
if "say" in sys.argv:
    sys.exit("a last word")
"""


def plan(*drop: OpOutput) -> Plan:
    """It holds what no operator makes, too, as under FSDP2, which gives weights their memory."""
    held = [OpOutput("storage.resize_", 0)]
    part = RecomputePart(groups=[RecomputeGroup("body", list(drop))], hold=held)
    return Plan(memplan_version="0.1.0", recompute=part)


NO_GPU = "memplan: no GPU here; of the plan, in effect on the CPU: recompute\n"
DROPS = (OpOutput("aten.addmm.default", 0), OpOutput("aten.relu.default", 0))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(JOB)
    save_plan(plan(*DROPS), tmp_path / "job.plan")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=dict(os.environ), check=False
    )


def memplan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "memplan", "run", *words)


def warm_memplan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.run(folder, "-m", "memplan", "run", *words)


def test_the_same_output_and_arguments(job: Path) -> None:
    plain = run(job, "train.py", "--lr", "--plan")
    planned = memplan(job, "--plan", "job.plan", "train.py", "--lr", "--plan")
    assert plain.returncode == planned.returncode == 0
    assert planned.stdout == plain.stdout and "__main__" in plain.stdout
    assert planned.stderr == NO_GPU
    as_module = warm_memplan(job, "--plan", "job.plan", "-m", "train", "--lr", "--plan")
    assert as_module.stdout == plain.stdout


def test_the_scripts_own_end(job: Path) -> None:
    assert warm_memplan(job, "--plan", "job.plan", "train.py", "leave").returncode == 7
    said = warm_memplan(job, "--plan", "job.plan", "train.py", "say")
    assert said.returncode == 1 and said.stderr.endswith("a last word\n")
    failed = warm_memplan(job, "--plan", "job.plan", "train.py", "fail")
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"{NO_GPU}Traceback")
    assert "ValueError: on purpose" in failed.stderr
    assert "memplan" not in failed.stderr.removeprefix(NO_GPU)


def test_what_moves_a_gpus_memory_is_said_not_to_be_in_effect(job: Path) -> None:
    parts = {"state": StatePart(share=1.0), "frozen": FrozenPart(share=1.0, ahead_bytes=0)}
    save_plan(msgspec.structs.replace(plan(*DROPS), **parts), job / "host.plan")
    planned = warm_memplan(job, "--plan", "host.plan", "train.py")
    assert planned.stdout == warm.run(job, "train.py").stdout
    off = "not in effect, for it moves a GPU's memory: state, frozen"
    assert planned.stderr == f"{NO_GPU.rstrip()}; {off}\n"


def test_a_plan_for_another_job_is_said_and_harmless(job: Path) -> None:
    other = plan(*DROPS, OpOutput("aten.gelu.default", 0))
    made_from = Fingerprint(command=["train.py", "--batch-size", "8"])
    save_plan(msgspec.structs.replace(other, made_from=made_from), job / "other.plan")
    planned = warm_memplan(job, "--plan", "other.plan", "train.py")
    assert planned.returncode == 0
    assert planned.stdout == warm.run(job, "train.py").stdout
    assert "2 of the 3 values that the plan drops were met" in planned.stderr
    assert "(The CPU's operators are not all those of a card.)" in planned.stderr
    assert "made for train.py --batch-size 8: where sizes differ, the peak" in planned.stderr


WHERE = """
import atexit, os, pickle, sys, threading

class Here: pass

def late():
    assert pickle.loads(pickle.dumps(Here)) is Here
    print("late")

atexit.register(late)
main = sys.modules["__main__"]
print(__file__, sys.argv, sys.path[0], __spec__, __package__, vars(main) is globals())
os.chdir("/")
raise ValueError
"""


def test_the_script_is_main_as_ever(job: Path) -> None:
    (job / "below").mkdir()
    (job / "below" / "where.py").write_text(WHERE)
    plain = run(job, "below/where.py", "x")
    planned = memplan(job, "--plan", "job.plan", "below/where.py", "x")
    assert (planned.returncode, planned.stdout) == (1, plain.stdout)
    assert planned.stderr == NO_GPU + plain.stderr and plain.stdout.endswith("late\n")


def test_what_never_began_has_no_traceback(job: Path) -> None:
    (job / "wrong.py").write_text("print(1")
    wrong = memplan(job, "--plan", "job.plan", "wrong.py")
    assert (wrong.returncode, wrong.stderr) == (1, NO_GPU + run(job, "wrong.py").stderr)
    (job / "package").mkdir()
    none = memplan(job, "--plan", "job.plan", "-m", "package")
    said = f"{NO_GPU}ImportError: No module named package"
    assert none.returncode == 1 and none.stderr.startswith(said)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--plan", "none.plan", "train.py"), "none.plan"),
        (("--plan", "train.py", "train.py"), "not a plan"),
        (("--plan", "job.plan", "trian.py"), "train.py"),
        (("--plan", "job.plan"), "no script"),
    ],
)
def test_not_started(job: Path, words: tuple[str, ...], says: str) -> None:
    result = memplan(job, *words)
    assert result.returncode == 125
    assert says in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""
