"""Three small trainings that need PyTorch alone, for the support matrix."""

from __future__ import annotations

import argparse

import torch
from torch import nn


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(256, 512)


def conv() -> tuple[nn.Module, torch.Tensor]:
    block = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Conv2d(32, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*block, *head), torch.randn(16, 3, 64, 64)


def decoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(4, 128, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("mlp", "conv", "decoder"))
    model, batch = {"mlp": mlp, "conv": conv, "decoder": decoder}[parser.parse_args().model]()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch.cuda()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print("loss", loss.item())


if __name__ == "__main__":
    main()
