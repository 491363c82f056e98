"""What only another rank has: the flags that it broadcasts, the files that it alone writes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import torch

from memplan.capturing.distributed.peers import Peers
from memplan.capturing.options import CaptureOptions, RankPlace, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile

ROOT = Path(__file__).resolve().parents[3]
TRAIN = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
{width}
net = torch.nn.Linear(256, int(width)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    {rows}
    net(torch.randn(int(rows), 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
AT_START = {
    "zeros on the device": """
flags = torch.tensor([4096 if rank == 2 else 0], device="cuda")
dist.broadcast(flags, 2)
width = flags[0].item()""",
    "an empty on the device": """
flags = torch.empty(1, dtype=torch.long, device="cuda")
if rank == 2:
    flags.fill_(4096)
dist.broadcast(flags, 2)
width = flags.cpu()[0]""",
    "on the host": """
width = torch.tensor(4096 if rank == 2 else 0)
dist.broadcast(width, 2, group=dist.new_group(backend="gloo"))""",
    "a whole number that is another one here": """
width = torch.tensor([4096 if rank == 2 else 2048], device="cuda")
dist.broadcast(width, 2)
width = width.item()""",
    "an object": """
width = [4096 if rank == 2 else None]
dist.broadcast_object_list(width, 2)
width = width[0]""",
    "an object with tensors": """
width = [None]
if rank == 2:
    state = {"state": torch.arange(4096).to(torch.uint8), "flag": torch.tensor(True)}
    width = [{**state, "none": torch.empty(0, 3), "half": torch.ones(2, dtype=torch.bfloat16)}]
dist.broadcast_object_list(width, 2)
assert width[0]["flag"] and width[0]["none"].shape == (0, 3) and width[0]["half"].sum() == 2
assert width[0]["state"][257] == 1
width = len(width[0]["state"])""",
    "a file": """
path = os.path.join(os.environ["CACHE"], "deep", "width.txt")
if rank == 0:
    os.makedirs(os.path.dirname(path))
    with open(path, "w") as file:
        file.write("4096")
dist.barrier()
width = open(path).read()""",
}


STEPS = """
    rows = torch.tensor([1000 if rank == 2 else 0], device="cuda")
    dist.broadcast(rows, 2)"""
RESTORED = """
ready = torch.tensor([1 if rank == 2 else 0], device="cuda")
dist.broadcast(ready, 2)
ready.item()
weight = torch.nn.Parameter(torch.zeros(8, device="cuda"))
weight.grad = torch.zeros_like(weight)
torch.optim.Adam([weight]).step()  # makes the state that a checkpoint is loaded into
flags = torch.tensor([4096 if rank == 2 else 2048], device="cuda")
dist.broadcast(flags, 2)
width = flags.item()"""
OWN = """
width = torch.tensor([4096.0 if rank == 3 else 2048.0], device="cuda")
dist.broadcast(width, 2)"""
CASES: dict[str, dict[str, str]] = {
    **{name: {"width": text} for name, text in AT_START.items()},
    "every step": {"rows": STEPS},
    "its own": {"width": OWN},
    "after a step without gradients": {"width": RESTORED},
}


def capture_all(folder: Path) -> None:
    """Sizes of the requests and texts of the assumptions of rank 3 of 4. A fork for each case: what
    has computed once cannot be forked for another rank."""
    for name in CASES:
        if os.fork() == 0:
            try:
                capture_one(folder / name.replace(" ", "-"), CASES[name])
            finally:
                os._exit(0)
        os.wait()


def capture_one(folder: Path, body: dict[str, str]) -> None:
    folder.mkdir()
    os.environ["CACHE"] = str(folder)
    script = folder / "train.py"
    script.write_text(TRAIN.format(**{"width": "width = 4096", "rows": "rows = 8", **body}))
    options = CaptureOptions(profile=find_profile("h100"), place=RankPlace(3, 4, 4))
    trace = capture_script(ScriptTarget("script", str(script)), options)
    texts = [item.text for item in trace.meta.assumptions]
    (folder / "found.json").write_text(json.dumps([trace.events.bytes.tolist(), texts]))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], list[str]]]:
    """In a process of its own: another rank is a fork, which computes."""
    folder = tmp_path_factory.mktemp("sent")
    call = "import sys, pathlib; from tests.capturing.distributed import test_broadcasts; "
    call += "test_broadcasts.capture_all(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", call, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*/deep"))
    return {
        path.parent.name.replace("-", " "): json.loads(path.read_text())
        for path in folder.glob("*/found.json")
    }


@pytest.mark.parametrize("name", [*AT_START, "its own", "after a step without gradients"])
def test_what_another_rank_knows(found: dict[str, tuple[list[int], list[str]]], name: str) -> None:
    sizes, assumed = found[name]
    assert 256 * 4096 * 4 in sizes
    assert not assumed


def test_sizes_of_every_step(found: dict[str, tuple[list[int], list[str]]]) -> None:
    sizes, assumed = found["every step"]
    assert sizes.count(1000 * 4096 * 4) >= 3
    assert not assumed


def test_what_is_told_outlives_who_told() -> None:
    """A generator's state, among objects: PyTorch would send it in the sender's shared memory."""
    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        try:
            Peers(theirs, answering=True).tell("state", [{"state": torch.arange(5056)}])
        finally:
            os._exit(0)
    theirs.close()
    os.waitpid(pid, 0)
    kind, key, content = ours.recv()
    assert (kind, key) == ("tell", "state")
    assert torch.equal(pickle.loads(content)[0]["state"], torch.arange(5056))


FAILS = """
import os, torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    raise ValueError("the index cannot be made")
open("index.bin")
"""


UNTRAINED = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    raise ValueError("the index cannot be made")
ready = torch.zeros(1, dtype=torch.long, device="cuda")
dist.broadcast(ready, 0)
if ready.item():
    print("training")
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [(FAILS, "FileNotFoundError"), (UNTRAINED, "rank 1 goes by what rank 0")],
)
def test_the_failure_of_the_rank_that_writes_is_said(
    tmp_path: Path, script: str, said: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "memplan", "estimate", "--gpu", "h100", "--world-size", "2"]
    done = subprocess.run(
        [*command, "--rank", "1", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert said in done.stderr
    assert "rank 0" in done.stderr
    assert "the index cannot be made" in done.stderr


COUNTED = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
os.write(int(os.environ["LOG"]), f"{{rank}} ".encode())
torch.cuda.set_device(rank)
flag = torch.tensor([7 if rank == 2 else 0], device="cuda")
{body}
"""
TRAINS = """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16).cuda())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    for _ in range(3):
        dist.broadcast(flag, 2)
        rows = flag.clone() * 2
        flag.zero_() if rank == 3 else None
        net(torch.randn({rows}, 16, device="cuda")).sum().backward()
    optimizer.step()
"""


def estimated(folder: Path, body: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The answer for rank 3 of 4, and the ranks that were run."""
    (folder / "train.py").write_text(COUNTED.format(body=body))
    command = [sys.executable, "-m", "memplan", "estimate", "--gpu", "h100", "--world-size", "4"]
    reading, writing = os.pipe()
    with os.fdopen(reading) as log:
        done = subprocess.run(
            [*command, "--json", "--rank", "3", "train.py"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "LOG": str(writing)},
            pass_fds=[writing],
            capture_output=True,
            text=True,
        )
        os.close(writing)
        return done, sorted(log.read().split())


def test_a_rank_is_run_once_for_all_questions(tmp_path: Path) -> None:
    first = "dist.broadcast(flag, 2)\nassert flag.item() == 7\n"
    done, ran = estimated(tmp_path, first + TRAINS.format(rows="int(rows.item())"))
    assert done.returncode == 0, done.stderr
    assert ran == ["2", "3"]


def test_a_rank_is_not_run_for_what_nobody_looks_at(tmp_path: Path) -> None:
    done, ran = estimated(tmp_path, TRAINS.format(rows=8))
    assert done.returncode == 0, done.stderr
    assert ran == ["3"]


@pytest.mark.parametrize(("rows", "code"), [("8", 0), ("int(rows.item())", 4)])
def test_a_sender_that_fails_matters_where_its_value_does(
    tmp_path: Path, rows: str, code: int
) -> None:
    body = 'if rank == 2:\n    raise ValueError("no such data")\n' + TRAINS.format(rows=rows)
    done, _ = estimated(tmp_path, body)
    assert done.returncode == code, done.stderr
    if code:
        assert "train.py:18: rank 3 goes by what rank 2 broadcasts" in done.stderr
        assert "ValueError: no such data" in done.stderr
    else:
        assert not [
            item for item in json.loads(done.stdout)["assumptions"] if item["kind"] == "rank"
        ]
