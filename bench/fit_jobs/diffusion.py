"""Train a diffusion transformer on latents of pictures (DiT-B/2's sizes): an ordinary script.

python diffusion.py --batch-size 128
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

STEPS_OF_NOISE = 1000


class Block(nn.Module):
    """Attention and an MLP, scaled and shifted as the condition says."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        batch, length, width = x.shape
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.condition(c)[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm_1(x) * (1 + scale_1) + shift_1)
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + gate_1 * self.out(mixed.reshape(batch, length, width))
        out: Tensor = x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)
        return out


class Denoiser(nn.Module):
    """From a noisy latent, its place in the noise and a class: the noise."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width, side = args.width, args.size // 2
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, side * side, width) * 0.02)
        self.times, self.classes = nn.Embedding(STEPS_OF_NOISE, width), nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width, args.heads) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2 * 2 * 4)

    def forward(self, latent: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(latent).flatten(2).transpose(1, 2) + self.places
        condition = self.times(times) + self.classes(classes)
        for block in self.blocks:
            x = block(x, condition)
        side = latent.shape[-1] // 2
        patches = self.head(self.norm(x)).transpose(1, 2).unflatten(2, (side, side))
        noise: Tensor = F.pixel_shuffle(patches, 2)
        return noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="a latent's side")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Denoiser(args).to(args.device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kept = torch.linspace(0.9999, 0.02, STEPS_OF_NOISE, device=args.device)
    for _ in range(args.steps):
        latent = torch.randn(args.batch_size, 4, args.size, args.size).to(args.device)
        times = torch.randint(STEPS_OF_NOISE, (args.batch_size,)).to(args.device)
        classes = torch.randint(1000, (args.batch_size,)).to(args.device)
        noise = torch.randn_like(latent)
        share = kept[times][:, None, None, None]
        noisy = share.sqrt() * latent + (1 - share).sqrt() * noise
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            loss = F.mse_loss(model(noisy, times, classes), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 1e-4)
        print("loss", float(loss.item()).hex())


if __name__ == "__main__":
    main()
