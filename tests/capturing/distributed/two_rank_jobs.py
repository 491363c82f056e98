"""Small jobs of data parallelism, eager and compiled, for real runs on two CPU processes and for
captures of one of their ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.capturing.distributed.real_ranks import Step, fork_ranks
from tests.capturing.distributed.sharded_jobs import WIDTH, Layer, stepper

SIZE = 2
LAYERS = 2
BACKEND = "aot_eager"
"""Its operators are those of a capture; Inductor's generated code is another for each device."""


class Wide(nn.Module):
    """Matrices enough for two buckets of 1 MiB, the least that Dynamo splits a graph at."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2500), nn.Linear(2500, WIDTH)
        self.again = nn.Linear(WIDTH, 2500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.again(x + self.down(torch.tanh(self.up(x))))
        return out


def checkpointed_blocks(device: str) -> Step:
    """Each block checkpointed, compiled, then sharded, as torchtitan does it."""
    mesh = init_device_mesh(device, (SIZE,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*(checkpoint_wrapper(Layer()) for _ in range(LAYERS))).to(device)
    for block in model:
        block.compile(backend=BACKEND, fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return stepper(model, device)


def replicated_inside(device: str) -> Step:
    """`DDP(torch.compile(model))`: the graph is split where buckets end."""
    compiled = torch.compile(Wide().to(device), backend=BACKEND)
    return stepper(DistributedDataParallel(compiled, bucket_cap_mb=1), device)


def replicated_outside(device: str) -> Step:
    """`torch.compile(DDP(model))`."""
    model = DistributedDataParallel(
        Wide().to(device), bucket_cap_mb=1, gradient_as_bucket_view=True, static_graph=True
    )
    return stepper(cast(nn.Module, torch.compile(model, backend=BACKEND)), device)


def _eager(model: nn.Module, device: str) -> Step:
    # Without foreach: PyTorch has it for CUDA, and another implementation for the CPU.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        out = model(torch.randn(16, 100, device=device))
        (out * out).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # where DDP arranges its buckets anew
    return step


def ddp(device: str) -> Step:
    """Two buckets: the second layer's and the first's."""
    model = nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 70)).to(device)
    return _eager(DistributedDataParallel(model, bucket_cap_mb=0.1), device)


def fsdp2(device: str) -> Step:
    """Dimensions that the ranks do not divide."""
    mesh = init_device_mesh(device, (SIZE,))
    model = nn.Sequential(nn.Linear(100, 301), nn.Tanh(), nn.Linear(301, 70)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _eager(model, device)


JOBS: dict[str, Callable[[str], Step]] = {
    job.__name__: job
    for job in (checkpointed_blocks, replicated_inside, replicated_outside, ddp, fsdp2)
}

if __name__ == "__main__":
    fork_ranks(JOBS, SIZE, Path(sys.argv[1]))
