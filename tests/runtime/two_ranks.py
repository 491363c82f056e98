"""A small model in a job of two processes (DDP, FSDP2, tensor parallel), and how it is run.

`found_by(file, folder)` runs a test's own file once for each rank, which calls `run(work)`; `work`
tells what it found of this rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests import warm

ROOT = Path(__file__).parents[2]
KINDS = ("ddp", "fsdp", "tensor parallel")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def parallel(
    kind: str,
    count: int,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    classes: int = 4,
) -> tuple[nn.Module, list[Any]]:
    """A model of this rank, and its blocks."""
    torch.manual_seed(0)
    blocks: list[Any] = [Block(width) for _ in range(count)]
    model = nn.Sequential(*blocks, nn.Linear(width, classes)).to(dtype)
    mesh = init_device_mesh("cpu", (2,))
    if kind == "ddp":
        return DistributedDataParallel(model), blocks
    for block in blocks:
        if kind == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "fsdp":
        fully_shard(model, mesh=mesh)
    return model, blocks


def seed_batches(kind: str, rank: int) -> None:
    """Ranks have batches of their own, but for those that share the model."""
    torch.manual_seed(1 if kind == "tensor parallel" else 1 + rank)


def weights(model: nn.Module) -> list[Tensor]:
    """What this rank has of them."""
    local: list[Any] = [getattr(one, "_local_tensor", one) for one in model.parameters()]
    return [one.detach() for one in local]


def run(work: Callable[[int], dict[str, Any]]) -> None:
    """In a process of the job."""
    rank = int(os.environ["RANK"])
    store = f"file://{sys.argv[1]}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    Path(sys.argv[1]).with_suffix(f".{rank}").write_text(json.dumps(work(rank)))
    dist.destroy_process_group()


def found_by(file: str, folder: Path) -> list[dict[str, Any]]:
    """Of both ranks."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    def one(rank: int) -> dict[str, Any]:
        environment = {**os.environ, "PYTHONPATH": path, "RANK": str(rank)}
        done = warm.run(folder, file, str(folder / "found"), env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((folder / f"found.{rank}").read_text())

    warm.server_of(warm.RUN)
    with ThreadPoolExecutor(2) as both:
        return list(both.map(one, (0, 1)))
