"""Launchers' commands, held to what the launchers themselves do."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from memplan.capturing.options import RankPlace, ScriptTarget
from memplan.cli import main
from memplan.cli.launchers import accelerate, accelerate_reader, torchrun
from memplan.cli.launchers.context import Context
from memplan.cli.launchers.launch import World
from memplan.types.errors import UsageError
from memplan.types.plan import OpOutput, Plan, RecomputeGroup, RecomputePart
from memplan.types.plan_file import save_plan
from tests import warm
from tests.cli.test_launchers import BIN, read

pytestmark = pytest.mark.usefixtures("no_settings")


def _options(parser: argparse.ArgumentParser) -> dict[str, int]:
    """Option strings with the number of words that each takes."""
    return {
        name: 0 if action.nargs == 0 else 1
        for action in parser._actions
        for name in action.option_strings
        if name not in ("-h", "--help")
    }


def test_every_option_of_torchrun_is_known() -> None:
    from torch.distributed.run import get_args_parser

    theirs = _options(get_args_parser())
    ours = {name: option.values for name, option in torchrun.TORCHRUN.names.items()}
    assert {name.replace("_", "-"): count for name, count in theirs.items()} == ours


@pytest.mark.parametrize(
    "line",
    [
        "--nproc-per-node 2 train.py --nnodes 3 -m",
        "--nproc_per_node=2 --rdzv-backend c10d --rdzv_endpoint=a:1 train.py",
        "-r 3 -t 0:1 --standalone -m pkg.train --role x",
        "-r3 --max-rest 2 train.py",
    ],
)
def test_torchruns_own_parser_agrees(line: str) -> None:
    from torch.distributed.run import get_args_parser

    theirs = get_args_parser().parse_args(line.split())
    given, rest = torchrun.TORCHRUN.read(line.split())
    assert rest == [theirs.training_script, *theirs.training_script_args]
    for key, values in given.items():
        assert str(getattr(theirs, key.replace("-", "_"))) == (values[-1] or "True")


PRINTS_ITS_ENVIRONMENT = """
import json, os, sys
rank = os.environ.get("RANK", "0")
with open(f"rank-{rank}.json", "w") as file:
    json.dump({"environment": dict(os.environ), "argv": sys.argv[1:]}, file)
"""
# Ports and names that differ from run to run, what Python's own start adds, and the store of an
# agent that a capture does not have.
NOT_COMPARED = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("LC_CTYPE", "CUDA_MODULE_LOADING", "TORCHELASTIC_USE_AGENT_STORE"),
}
OF_THE_PLACE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc-per-node 2 --max-restarts 0 --role trainer script.py --x 1",
        "accelerate-launch --num_processes 2 --multi_gpu --mixed_precision bf16 script.py --x 1",
    ],
)
def test_the_environment_of_real_workers(line: str, tmp_path: Path) -> None:
    """A real launcher, two real processes, no GPU: both find what our reading says."""
    from memplan.capturing.distributed.place import rank_environment

    (tmp_path / "script.py").write_text(PRINTS_ITS_ENVIRONMENT)
    before = {**os.environ, "MASTER_PORT": "0"}
    name, *words = line.split()
    done = subprocess.run(
        [str(BIN / name), *words], cwd=tmp_path, env=before, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    launch = read(line)
    assert launch.world == World(2, 2)
    for rank in range(2):
        place = launch.world.place(rank)
        real = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert tuple(real["argv"]) == (*launch.arguments(place), *launch.target.argv)
        theirs = {k: v for k, v in real["environment"].items() if before.get(k) != v}
        ours = rank_environment(place, launch.environment(place))
        assert theirs.keys() >= OF_THE_PLACE
        assert _compared(ours) == _compared(theirs)


def _compared(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in NOT_COMPARED}


# accelerate, read by itself


@pytest.fixture
def reader_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's reader in this process. In one of its own, which takes seconds to start, it is
    held to a real launch above."""
    import torch
    from accelerate.utils import launch as preparing

    for place, name in (
        *((torch.cuda, name) for name in ("is_available", "device_count", "is_bf16_supported")),
        (preparing, "is_port_in_use"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))  # put back what the reader replaces

    def ask(words: list[str], context: Context) -> accelerate.Reading:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in context.environment.items():
                environment.setenv(name, value)
            return accelerate_reader._answer(accelerate.Question(words, context.gpus_per_node))

    monkeypatch.setattr(accelerate, "_ask", ask)


@pytest.mark.usefixtures("reader_here")
def test_accelerate_says_what_fsdp_is_told() -> None:
    line = "accelerate launch --num_processes 8 --use_fsdp --fsdp_offload_params true train.py --y"
    launch = read(line)
    found = launch.environment(RankPlace(3, 8, 8))
    assert launch.world == World(8, 8)
    assert launch.target == ScriptTarget("script", "train.py", ("--y",))
    assert found["ACCELERATE_USE_FSDP"] == "true" and found["FSDP_OFFLOAD_PARAMS"] == "true"


@pytest.mark.usefixtures("reader_here")
def test_a_settings_file_of_accelerate(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 2\n"
        "num_processes: 16\nmachine_rank: 0\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
        "mixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
    )
    launch = read(f"accelerate launch --config_file {settings} -m pkg.train --y")
    found = launch.environment(RankPlace(15, 16, 8))
    assert launch.world == World(16, 8)
    assert launch.target == ScriptTarget("module", "pkg.train", ("--y",))
    assert found["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launch.notes == (f"accelerate launch: settings from {settings}",)


@pytest.mark.usefixtures("reader_here")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nope 4 train.py", "--nope"),
        ("train.py", "one process for each GPU"),
        ("--config_file no.yaml train.py", "no.yaml"),
    ],
)
def test_accelerate_refuses(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(f"accelerate launch {words}")


def test_what_a_launcher_without_a_number_is_told_works_for_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.ones(1, 4, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    words = ["accelerate", "launch", "--mixed_precision=fp16", "train.py"]
    assert main(["estimate", "--gpu", "rtx4090", *words]) == 2
    assert "--gpus-per-node 8 before accelerate" in capsys.readouterr().err
    command = ["estimate", "--json", "--gpu", "rtx4090", "--gpus-per-node", "1", *words]
    done = warm.memplan(tmp_path, *command)
    assert done.returncode == 0, done.stderr


def test_accelerate_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="accelerate is not installed") as caught:
        read("accelerate launch --num_processes 2 train.py")
    assert "pip install accelerate" in caught.value.hint


DDP_JOB = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
body = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
net = torch.nn.parallel.DistributedDataParallel(body)
optimizer = torch.optim.AdamW(net.parameters())
torch.manual_seed(dist.get_rank())
profiler = torch.profiler.profile()
profiler.start()
for step in range(3):
    loss = net(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # In one write: the ranks share stdout.
    print(f"rank {dist.get_rank()} step {step} {loss.item().hex()}\\n", end="", flush=True)
profiler.stop()
calls = sum(event.count for event in profiler.key_averages() if event.key == "aten::relu")
print(f"{calls} calls\\n", end="", flush=True, file=sys.stderr)
dist.destroy_process_group()
"""


def _plain_losses() -> list[str]:
    """What both ranks of `DDP_JOB` print without a plan: each averages the gradients of both."""
    import torch

    bodies, batches = [], []
    for rank in range(2):
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
        bodies.append(torch.nn.Sequential(*layers))
        torch.manual_seed(rank)
        batches.append([torch.randn(16, 8) for _ in range(3)])
    optimizers = [torch.optim.AdamW(body.parameters()) for body in bodies]
    lines = []
    for step in range(3):
        for rank, body in enumerate(bodies):
            loss = body(batches[rank][step]).square().mean()
            loss.backward()
            lines.append(f"rank {rank} step {step} {loss.item().hex()}")
        for both in zip(*(body.parameters() for body in bodies), strict=True):
            average = sum(parameter.grad / 2 for parameter in both)
            for parameter in both:
                parameter.grad = average
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return lines


def test_run_below_torchrun(tmp_path: Path) -> None:
    """Both ranks of a real job apply the plan, with the losses of the plain job to the bit."""
    (tmp_path / "train.py").write_text(DDP_JOB)
    drops = [OpOutput("aten.addmm.default", 0), OpOutput("aten.relu.default", 0)]
    part = RecomputePart(groups=[RecomputeGroup("DistributedDataParallel.module", drops)])
    save_plan(Plan(memplan_version="0.1.0", recompute=part), tmp_path / "job.plan")
    launch = read("torchrun --nproc-per-node 2 --master-port 0 --standalone train.py")
    words = launch.words_below("memplan", "run", "--plan", "job.plan")
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(_plain_losses())
    calls = re.findall(r"^(\d+) calls$", done.stderr, re.M)
    assert len(calls) == 2 and all(int(count) > 3 for count in calls), "three without the plan"


def test_run_before_a_launcher_says_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plan", "job.plan", "torchrun", "--nproc-per-node", "2", "a.py"]) == 125
    hint = "torchrun --nproc-per-node 2 -m memplan run --plan job.plan a.py"
    assert hint in capsys.readouterr().err
