"""Offload and recomputation in jobs of two processes: DDP, FSDP2, tensor parallel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
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

from memplan.runtime.apply import AppliedEverywhere
from memplan.runtime.tape import Offload
from memplan.types.plan import OffloadPart, OpOutput, RecomputeGroup, RecomputePart
from tests.runtime.harness import recomputations, same_bits

ROOT = Path(__file__).parents[2]
KINDS = ("ddp", "fsdp", "tensor parallel")
OPS = ["native_layer_norm", "addmm", "gelu", "mm", "view"]
PLACES = [OpOutput(f"aten.{op}.default", nth) for op in OPS for nth in range(8)]
GELUS = [place for place in PLACES if "gelu" in place.op]
OTHERS = [place for place in PLACES if "gelu" not in place.op]


def offload(values: list[OpOutput]) -> OffloadPart:
    return OffloadPart(values=values[::-1], out_bytes=1000, ahead_bytes=2000)


WAYS: dict[str, tuple[RecomputePart | None, OffloadPart]] = {
    "offload": (None, offload(PLACES)),
    "both": (RecomputePart(groups=[RecomputeGroup("gelu", GELUS)]), offload(OTHERS)),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def parallel(kind: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(), Block(), Block()]
    model = nn.Sequential(*blocks, nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (2,))
    if kind == "ddp":
        return DistributedDataParallel(model)
    for block in blocks:
        if kind == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "fsdp":
        fully_shard(model, mesh=mesh)
    return model


def trained(kind: str, way: str | None, rank: int) -> tuple[list[Tensor], int, int]:
    """Losses and weights, how many values went to the host, and how often was recomputed."""
    model = parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(1 if kind == "tensor parallel" else 1 + rank)
    losses: list[Tensor] = []
    sent: list[bool] = []
    offload_class: Any = Offload
    plain_send = offload_class.send

    def send(*arguments: Any) -> bool:
        sent.append(plain_send(*arguments))
        return sent[-1]

    parts = WAYS[way] if way else (None, None)
    lever: Any = nullcontext()
    if way:
        lever = AppliedEverywhere(parts[0], offload=parts[1], devices=("cpu",))
    offload_class.send = send
    with lever, recomputations() as groups:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(4, (6,)))
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
    offload_class.send = plain_send
    weights: list[Any] = [getattr(one, "_local_tensor", one) for one in model.parameters()]
    return [*losses, *(one.detach() for one in weights)], sum(sent), len(groups)


def work(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in KINDS:
        plain, _, _ = trained(kind, None, rank)
        for way in WAYS:
            planned, sent, recomputed = trained(kind, way, rank)
            found[f"{kind}: {way}"] = [all(map(same_bits, plain, planned)), sent, recomputed]
    out.with_suffix(f".{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *command, __file__, str(folder / "found")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(kind: str, way: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        same, sent, recomputed = of_rank[f"{kind}: {way}"]
        assert same
        assert sent > 6 * 3  # in each of six passes
        assert bool(recomputed) == (way == "both")


if __name__ == "__main__":
    work(int(os.environ["RANK"]), Path(sys.argv[1]))
