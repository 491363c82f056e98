"""What only another rank has: the flags that it broadcasts, the files that it alone writes."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import torch

from memplan.capturing.distributed.peers import Peers
from memplan.capturing.options import CaptureOptions, RankPlace, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.cli import main
from memplan.types.device import find_profile
from tests import warm

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
    "a list of hundreds": """
order = torch.tensor([4096] * 302 if rank == 2 else [-1] * 302, device="cuda")
dist.broadcast(order, 2)
width = [one.item() for one in order.cpu()][301]""",
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
FIRST = "dist.broadcast(flag, 2)\nassert flag.item() == 7\n"
NO_DATA = 'if rank == 2:\n    raise ValueError("no such data")\n'
OF_TWO = ("--world-size", "2", "--rank", "1")
OF_FOUR = ("--world-size", "4", "--rank", "3", "--json")
COMMANDS = {
    "a writer that fails": (FAILS, OF_TWO),
    "a trainer that fails": (UNTRAINED, OF_TWO),
    "all questions": (COUNTED.format(body=FIRST + TRAINS.format(rows="int(rows.item())")), OF_FOUR),
    "no question": (COUNTED.format(body=TRAINS.format(rows=8)), OF_FOUR),
    "unseen failure": (COUNTED.format(body=NO_DATA + TRAINS.format(rows=8)), OF_FOUR),
    "failure": (COUNTED.format(body=NO_DATA + TRAINS.format(rows="int(rows.item())")), OF_FOUR),
}


def capture_all(folder: Path) -> None:
    """Sizes of the requests and texts of the assumptions of rank 3 of 4, and what commands say. A
    fork for each case: what has computed once cannot be forked for another rank."""
    for name in ("torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes"):
        importlib.import_module(name)  # else each capture does
    for name in (*CASES, *COMMANDS):
        if os.fork() == 0:
            try:
                if name in CASES:
                    capture_one(folder / name.replace(" ", "-"), CASES[name])
                else:
                    command_one(folder / name.replace(" ", "-"), *COMMANDS[name])
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


def command_one(folder: Path, script: str, words: tuple[str, ...]) -> None:
    folder.mkdir()
    os.chdir(folder)
    Path("train.py").write_text(script)
    os.environ["LOG"] = str(opened("ran"))
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(opened(name), number)
    code = main(["estimate", "--gpu", "h100", *words, "train.py"])
    sys.stdout.flush()
    Path("code").write_text(str(code))


def opened(name: str) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a process of its own: another rank is a fork, which computes."""
    folder = tmp_path_factory.mktemp("sent")
    call = "import sys, pathlib; from tests.capturing.distributed import test_broadcasts; "
    call += "test_broadcasts.capture_all(pathlib.Path(sys.argv[1]))"
    done = warm.run(ROOT, "-c", call, str(folder), modules=warm.CAPTURE)
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*/deep"))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, tuple[list[int], list[str]]]:
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


@dataclass
class Said:
    """What a command left."""

    code: int
    stdout: str
    stderr: str
    ran: list[str]
    """The ranks that were run, as far as they tell."""


def said_by(folder: Path, name: str) -> Said:
    names = ("code", "stdout", "stderr", "ran")
    code, stdout, stderr, ran = ((folder / name.replace(" ", "-") / n).read_text() for n in names)
    return Said(int(code), stdout, stderr, sorted(ran.split()))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a writer that fails", "FileNotFoundError"),
        ("a trainer that fails", "rank 1 goes by what rank 0"),
    ],
)
def test_the_failure_of_the_rank_that_writes_is_said(folder: Path, name: str, said: str) -> None:
    done = said_by(folder, name)
    assert done.code == 4
    assert said in done.stderr
    assert "rank 0" in done.stderr
    assert "the index cannot be made" in done.stderr


def test_a_rank_is_run_once_for_all_questions(folder: Path) -> None:
    done = said_by(folder, "all questions")
    assert done.code == 0, done.stderr
    assert done.ran == ["2", "3"]


def test_a_rank_is_not_run_for_what_nobody_looks_at(folder: Path) -> None:
    done = said_by(folder, "no question")
    assert done.code == 0, done.stderr
    assert done.ran == ["3"]


def test_a_sender_that_fails_matters_where_its_value_does(folder: Path) -> None:
    done = said_by(folder, "failure")
    assert done.code == 4, done.stderr
    assert "train.py:18: rank 3 goes by what rank 2 broadcasts" in done.stderr
    assert "ValueError: no such data" in done.stderr
    done = said_by(folder, "unseen failure")
    assert done.code == 0, done.stderr
    assert not [item for item in json.loads(done.stdout)["assumptions"] if item["kind"] == "rank"]


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_another_rank_has_its_own_argument(option: str) -> None:
    target = ScriptTarget("script", "train.py", (f"{option}=1", "--steps", "1"))
    other = target.as_rank(RankPlace(5, 8, 4), RankPlace(3, 8, 4))
    assert other.argv == (f"{option}=3", "--steps", "1")
