"""A small training under DistributedDataParallel, started by torchrun, for the support matrix."""

from __future__ import annotations

import os

import torch
from torch import distributed, nn


def main() -> None:
    distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        parallel(torch.randn(32, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
