"""A job of a CPU's size. An ordinary script but for the last lines, which measure a step.

python mlp.py --device cpu
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    blocks = [Block(args.width) for _ in range(args.blocks)]
    model = nn.Sequential(*blocks, nn.Linear(args.width, 10)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(args.batch_size, args.width, device=args.device)
    labels = torch.randint(0, 10, (args.batch_size,), device=args.device)

    run = torch.compile(model) if args.compile else model

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run(batch), labels)
        loss.backward()
        optimizer.step()
        print("loss", float(loss.item()).hex())

    for _ in range(args.steps):
        step()
    if os.environ.get("MEASURE"):
        from bench.recompute.tracker import measure

        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        print("peak", measure(step, [*model.parameters(), *momenta, batch, labels]).peak_bytes)


if __name__ == "__main__":
    main()
