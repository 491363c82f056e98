"""A model on the kernels of an extension that needs a GPU to be built: rules.py, beside this, says
what they take of its memory (`memplan estimate --with rules.py pretrain.py`)."""

from __future__ import annotations

import argparse
from typing import Any

import fused_mlp  # type: ignore[import-not-found]
import torch
from torch import nn


class Block(nn.Module):
    """Normalisation and the extension's feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.empty(4 * width, width))
        self.down = nn.Parameter(torch.empty(width, 4 * width))

    def forward(self, x: torch.Tensor) -> Any:
        return x + fused_mlp.forward(self.norm(x), self.up, self.down)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    model = nn.Sequential(*(Block(args.width) for _ in range(8))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(args.steps):
        x = torch.randn(args.batch_size, 512, args.width, device="cuda", dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
