"""The environment, the device and the groups of a captured rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memplan.capturing.options import CaptureOptions, RankPlace, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError, UsageError
from memplan.types.trace import EventKind
from tests.capturing.distributed.ranks import capture, join, options, requests


def test_a_rank_finds_its_place_in_the_environment_and_leaves_none_behind() -> None:
    before = dict(os.environ)
    seen: dict[str, str] = {}
    with CaptureSession(options(5, 8, 4, environment={"SLURM_PROCID": "5"})):
        seen.update(os.environ)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID")
    assert [seen[name] for name in names] == ["5", "1", "8", "4", "1", "5"]
    assert dict(os.environ) == before


def test_a_place_that_no_job_has_is_refused() -> None:
    for rank, size, local in ((8, 8, 8), (0, 6, 4), (-1, 2, 2), (0, 0, 1), (0, 32, 32)):
        with pytest.raises(UsageError):
            CaptureSession(options(rank, size, local))


def test_a_world_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be captured"):
        CaptureSession(options(0, 10**9, 8))


def test_training_on_the_own_device_of_another_index() -> None:
    found: list[object] = []

    def job() -> None:
        join()
        own = torch.device("cuda", 3)
        model = nn.Linear(8, 8).cuda()
        batch = torch.randn(4, 8).to("cuda")
        found.extend([torch.cuda.device_count(), torch.cuda.current_device()])
        found.append(batch.to(own) is batch and batch.device == own == model.weight.device)
        (model(batch) + model(batch).sin()).sum().backward()
        found.append(model.weight.grad is not None and model.weight.grad.device == own)
        torch.optim.AdamW(model.parameters()).step()

    trace = capture(job, rank=3, size=4)
    assert found == [4, 3, True, True]
    assert {event.device for event in trace} == {0}


def test_another_ranks_device_is_told_apart() -> None:
    def job() -> None:
        join()
        torch.empty(2000, device="cuda")
        torch.empty(1000, device="cuda:0")

    trace = capture(job, rank=1, size=2)
    assert [(event.bytes, event.device) for event in requests(trace)] == [(8000, 0), (4000, 1)]


def test_a_device_that_is_not_there() -> None:
    with CaptureSession(options(0, 2)):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(2)
        with pytest.raises(CaptureError, match="2 devices"):
            torch.empty(1, device="cuda:2")


def test_groups_and_meshes() -> None:
    found: list[object] = []

    def job() -> None:
        join()
        found.append((dist.get_rank(), dist.get_world_size(), dist.get_backend()))
        half = dist.new_group([4, 5, 6, 7])
        found.append((dist.get_rank(half), dist.get_world_size(half)))
        part = dist.split_group(None, [[0, 1], [2, 3], [4, 5], [6, 7]])
        found.append(dist.get_process_group_ranks(part))
        mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        found.append(
            (tuple(mesh.get_coordinate() or ()), mesh["dp"].size(), mesh.get_local_rank("tp"))
        )
        gloo = dist.new_group(backend="gloo")
        dist.monitored_barrier(gloo)
        gloo.monitored_barrier()
        dist.destroy_process_group()

    available = dist.is_nccl_available()
    capture(job, rank=5, size=8)
    assert found == [(5, 8, "nccl"), (1, 4), [4, 5], ((1, 0, 1), 2, 1)]
    assert not dist.is_initialized()
    assert dist.is_nccl_available() == available


def test_a_group_of_another_size_is_refused() -> None:
    with CaptureSession(options(0, 2)), pytest.raises(CaptureError, match="world_size=4"):
        dist.init_process_group("nccl", rank=0, world_size=4)


def test_without_a_place_the_scripts_own_numbers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    plain = CaptureOptions(profile=find_profile("a100-80gb"))
    with CaptureSession(plain):
        with pytest.raises(CaptureError, match="which rank of how many") as refused:
            dist.init_process_group("nccl")
        assert "--world-size" in refused.value.hint
        dist.init_process_group("nccl", init_method="tcp://10.0.0.1:1?rank=1&world_size=3")
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)


def test_spawned_ranks_run_here(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def train(rank, size):\n"
        "    torch.cuda.set_device(rank)\n"
        "    dist.init_process_group('nccl', init_method='env://', rank=rank, world_size=size)\n"
        "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    for _ in range(5):\n"
        "        model(torch.randn(8, 64, device=rank)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(train, (torch.cuda.device_count(),), nprocs=torch.cuda.device_count())\n"
    )
    trace = capture_script(
        ScriptTarget("script", str(script)),
        CaptureOptions(profile=find_profile("a100-80gb"), place=RankPlace(1, 4, 4)),
    )
    assert trace.meta.optimizer_steps >= 3
    assert [item.ranks for item in trace.meta.communicators] == [4]
    with CaptureSession(options(0, 4)), pytest.raises(CaptureError, match="2 processes"):
        mp.spawn(print, nprocs=2)  # type: ignore[attr-defined]
    assert "torch.multiprocessing.spawn" in sys.modules


def test_storages_end_and_begin_when_they_are_resized() -> None:
    def job() -> None:
        storage = torch.empty(1000, device="cuda").untyped_storage()
        storage.resize_(0)
        storage.resize_(4000)
        storage.resize_(8000)

    trace = capture(job)
    kinds = (EventKind.ALLOC, EventKind.FREE)
    moves = [(event.kind, event.storage, event.bytes) for event in trace if event.kind in kinds]
    assert moves == [
        (EventKind.ALLOC, 0, 4000),
        (EventKind.FREE, 0, 4000),
        (EventKind.ALLOC, 1, 4000),
        (EventKind.ALLOC, 2, 8000),  # what was in the old memory is copied
        (EventKind.FREE, 1, 4000),
        (EventKind.FREE, 2, 8000),
    ]
