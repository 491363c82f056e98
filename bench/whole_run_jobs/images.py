"""Image classification on pictures of several sizes, one size to a batch."""

from __future__ import annotations

import argparse
import random
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZES = (128, 160, 192, 224, 256, 288, 320)


class Pictures(Dataset[torch.Tensor]):
    """A batch at a time."""

    def __init__(self, batches: int, batch_size: int, seed: int) -> None:
        draw = random.Random(seed)
        self.sizes = [draw.choice(SIZES) for _ in range(batches)]
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self.sizes[index]
        return torch.zeros(self.batch_size, 3, size, size)


def block(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    widths = (64, 64, 128, 256, 512)
    layers = [block(3, 64, 2)]
    layers += [block(a, b, 2 if a != b else 1) for a, b in pairwise(widths)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pictures = Pictures(args.batches, args.batch_size, args.seed)
    for images in DataLoader(pictures, batch_size=None, shuffle=True):
        labels = torch.zeros(len(images), dtype=torch.long, device="cuda")
        nn.functional.cross_entropy(model(images.cuda()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
