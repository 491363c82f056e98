"""A GPT of 1.5 billion parameters in pipeline stages, one a rank: an ordinary script.

torchrun --nproc-per-node 4 pipeline.py --batch-size 4 --micro-batches 8
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

VOCABULARY = 50257


class Layer(nn.Module):
    """A pre-norm block that attends to what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


def stage_of(rank: int, ranks: int, args: argparse.Namespace) -> nn.Module:
    """This rank's layers, with the embedding before the first and the head behind the last."""
    share = args.layers // ranks
    parts: list[nn.Module] = [Layer(args.width, args.heads) for _ in range(share)]
    if rank == 0:
        parts.insert(0, nn.Embedding(VOCABULARY, args.width))
    if rank == ranks - 1:
        parts += [nn.LayerNorm(args.width), nn.Linear(args.width, VOCABULARY, bias=False)]
    return nn.Sequential(*parts)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--heads", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = stage_of(rank, ranks, args).to(device)
    stage = PipelineStage(model, rank, ranks, device)
    schedule: Any = Schedule1F1B(stage, args.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = (args.micro_batches * args.batch_size, args.length)
    for _ in range(args.steps):
        tokens = torch.randint(VOCABULARY, rows).to(device)
        first, last = rank == 0, rank == ranks - 1
        schedule.step(*([tokens] if first else []), **({"target": tokens} if last else {}))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
