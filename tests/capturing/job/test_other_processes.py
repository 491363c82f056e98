"""The GPU in a process that the script starts: said, with the line and what to try."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

TRAINING = """
def train(rank, world):
    torch.cuda.set_device(rank)
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        model(torch.randn(4, 8).cuda()).sum().backward()
        optimizer.step()
"""
HEAD = "import os\nimport torch\nimport torch.multiprocessing as mp\n" + TRAINING
MAIN = "if __name__ == '__main__':\n    "
LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Linear(512, 512).to(device)
if __name__ == "__main__":
    data = TensorDataset(torch.randn(256, 512))
    for (batch,) in DataLoader(data, num_workers=1, multiprocessing_context="spawn"):
        model(batch.cuda()).sum().backward()
"""
WORKER = "memplan estimate --world-size N --rank R captures one rank of a job"


def estimate(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "job.py").write_text(text)
    return warm.memplan(tmp_path, "estimate", "--json", "--gpu", "l4", "job.py")


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        (HEAD + MAIN + "mp.spawn(train, args=(1,), nprocs=2)", "6", WORKER),
        (
            HEAD + MAIN + "p = mp.get_context('fork').Process(target=train, args=(0, 1))\n"
            "    p.start()\n    p.join()",
            "10|7",  # the later one where PyTorch is built without CUDA
            WORKER,
        ),
        (
            HEAD + MAIN + "p = mp.get_context('forkserver').Process(target=train, args=(0, 1))\n"
            "    p.start()\n    p.join()",
            "6",
            WORKER,
        ),
        (LOADER, "5", 'put the line under `if __name__ == "__main__":`'),
    ],
    ids=["spawn", "fork", "forkserver", "module level"],
)
def test_cuda_in_another_process_is_refused(
    tmp_path: Path, text: str, line: str, hint: str
) -> None:
    done = estimate(tmp_path, text)
    assert done.returncode == 4
    assert re.search(rf"memplan: error: job\.py:({line}): CUDA is used in a ", done.stderr)
    assert f"try: {hint}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_process_that_fails_by_itself(tmp_path: Path) -> None:
    fails = "\ndef fails(rank):\n    raise RuntimeError('built without NCCL')\n"
    done = estimate(tmp_path, HEAD + fails + MAIN + "mp.spawn(fails, nprocs=2)")
    assert done.returncode == 4
    assert "job.py:16: a process started by torch.multiprocessing failed: RuntimeError: built " in (
        done.stderr
    )
    assert "call the worker function directly" in done.stderr


BESIDE = """
import os, subprocess, sys, time

def aside():
    subprocess.Popen(["sleep", "611"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(611)
"""
FORKED = "if os.fork() == 0:\n        torch.ones(1, device='cuda')\n        os._exit(0)\n    "
PROGRAM = "subprocess.run([sys.executable, '-c', 'import torch'])\n    "
HARMLESS = "subprocess.run([sys.executable, '-c', 'print(1)'], stdout=sys.stderr)\n    "
RUNNING = "mp.get_context('fork').Process(target=aside).start()\n    time.sleep(1)\n    "
SHELL = "subprocess.Popen('sleep 612 & sleep 613', shell=True, stdout=2)\n    "


def test_beside_a_job_that_trains_it_is_an_assumption(tmp_path: Path) -> None:
    """And nothing of what the script started is left, its children's children included."""
    beside = FORKED + "os.wait()\n    " + PROGRAM + HARMLESS + RUNNING + SHELL
    done = estimate(tmp_path, HEAD + BESIDE + MAIN + beside + "train(0, 1)")
    assert done.returncode == 0, done.stderr
    said = {
        item["source"]: item["text"]
        for item in json.loads(done.stdout)["assumptions"]
        if item["kind"] == "process"
    }
    end = "; what it takes of the card, its CUDA context included, is not counted"
    assert said == {
        "job.py:20": "another process that the script starts uses CUDA too" + end,
        "job.py:23": f"`{sys.executable} -c 'import torch'` runs in another process, without a GPU "
        "here" + end,
        "job.py:15": "aside runs in another process, which was ended with the capture" + end,
    }
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"sleep\x0061" in command for command in commands)
