"""Small jobs for a real run on CPU processes and for a capture of one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.capturing.distributed.real_ranks import fork_ranks

SMALL = 64
"""Bytes: the profiler does not see all of the engine's own scalars."""
Step = Callable[[], None]


def _stepper(model: nn.Module, width: int, device: str) -> Step:
    # Without foreach: PyTorch has it for CUDA, and another implementation for the CPU.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        out = model(torch.randn(16, width, device=device))
        (out * out).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(device: str) -> Step:
    """Two buckets: the second layer's and the first's."""
    model = nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 70)).to(device)
    return _stepper(DistributedDataParallel(model, bucket_cap_mb=0.1), 100, device)


def fsdp2(device: str) -> Step:
    """Dimensions that the ranks do not divide."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(100, 301), nn.Tanh(), nn.Linear(301, 70)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _stepper(model, 100, device)


JOBS = {"ddp": ddp, "fsdp2": fsdp2}
SIZE = 2


def _after_a_step(make: Callable[[str], Step]) -> Callable[[str], Step]:
    """The job from its second step on: the first is where DDP arranges its buckets anew."""

    def made(device: str) -> Step:
        step = make(device)
        step()
        return step

    return made


REAL_JOBS = {name: _after_a_step(make) for name, make in JOBS.items()}


if __name__ == "__main__":
    fork_ranks(REAL_JOBS, SIZE, Path(sys.argv[1]))
