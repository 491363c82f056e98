"""The networks, in plain PyTorch with random weights: nothing but torch is needed.

Each is made on its device, in bf16 autocast but for Llama, whose weights are bf16 themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.gpu_jobs.models import UNet

SEED = 1729


@dataclass(frozen=True)
class Training:
    """A model and one batch on a device."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Tensor], Tensor]
    blocks: Sequence[nn.Module]
    """What users checkpoint one by one."""

    def step(self) -> Tensor:
        """Forward and backward into fresh gradients; the loss."""
        self.module.zero_grad(set_to_none=True)
        loss = self.loss(self.module(*self.inputs))
        loss.backward()
        return loss.detach()

    def resident_bytes(self) -> int:
        """Weights, buffers and inputs."""
        tensors = (*self.module.parameters(), *self.module.buffers(), *self.inputs)
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values())


@contextmanager
def checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, each block is checkpointed by itself."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class _Autocast(nn.Module):
    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner, self.device_type = inner, device.type

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device_type, torch.bfloat16):
            out: Tensor = self.inner(x)
        return out


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop_1, self.drop_2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop_1(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        y = self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        out: Tensor = x + self.drop_2(y)
        return out


class _Gpt(nn.Module):
    def __init__(self, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(_GptBlock(width, heads, 0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, head = heads, groups, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * head, bias=False)
        self.v = nn.Linear(width, groups * head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k = (_rotated(self._heads(p(y), n), cos, sin)
                for p, n in ((self.q, self.heads), (self.k, self.groups)))  # fmt: skip
        k, v = (t.repeat_interleave(self.heads // self.groups, 1)
                for t in (k, self._heads(self.v(y), self.groups)))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Llama(nn.Module):
    def __init__(
        self, vocabulary: int, layers: int, width: int, inner: int, heads: int, groups: int
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_LlamaBlock(width, inner, heads, groups) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cos, sin = self._rotary(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _rotary(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.head_width, 2, device=like.device) / self.head_width
        angles = torch.arange(length, device=like.device)[:, None] * 10000.0**-half
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        changes = stride != 1 or inputs != 4 * width
        self.skip = nn.Sequential(*_convolution(inputs, 4 * width, 1, stride)) if changes else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x if self.skip is None else self.skip(x)
        out: Tensor = self.relu(y)
        return out


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def _resnet(depths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = [
        *_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inputs = 64
    for stage, depth in enumerate(depths):
        for number in range(depth):
            width = 64 << stage
            layers.append(_Bottleneck(inputs, width, 2 if stage and not number else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def _cross_entropy(device: torch.device, targets: Tensor, classes_first: bool) -> Any:
    """Over flat rows: per pixel, the loss has no deterministic kernel on CUDA."""

    def loss(logits: Tensor) -> Tensor:
        rows = logits.movedim(1, -1) if classes_first else logits
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(rows.flatten(0, -2), targets.flatten())

    return loss


def _text(
    device: torch.device, module: nn.Module, blocks: Any, batch: int, length: int, vocabulary: int
) -> Training:
    tokens, targets = torch.randint(0, vocabulary, (2, batch, length), device=device).unbind(0)
    loss = _cross_entropy(device, targets.clone(), classes_first=False)
    return Training(module, (tokens.clone(),), loss, list(blocks))


def gpt2_medium(device: torch.device, small: bool) -> Training:
    """24 layers of width 1024, 8 × 1024 tokens, dropout 0.1."""
    batch, length, vocabulary, layers, width = (
        (2, 32, 256, 1, 64) if small else (8, 1024, 50257, 24, 1024)
    )
    model = _Gpt(vocabulary, length, layers, width, width // 64)
    module = _Autocast(model, device)
    return _text(device, module, model.blocks, batch, length, vocabulary)


def llama_1b(device: torch.device, small: bool) -> Training:
    """22 layers of width 2048, 32 heads on 4, 4 × 1024 tokens, weights in bf16."""
    batch, length, vocabulary, layers, width, inner, heads = (
        (2, 32, 256, 2, 64, 160, 4) if small else (4, 1024, 32000, 22, 2048, 5632, 32)
    )
    model = _Llama(vocabulary, layers, width, inner, heads, heads // (2 if small else 8))
    model.to(torch.bfloat16)
    return _text(device, model, model.blocks, batch, length, vocabulary)


def resnet_50(device: torch.device, small: bool) -> Training:
    """128 pictures of 224 × 224."""
    batch, size, depths = (2, 32, (1, 1, 1, 1)) if small else (128, 224, (3, 4, 6, 3))
    model = _resnet(depths)
    images = torch.rand(batch, 3, size, size, device=device)
    targets = torch.randint(0, 1000, (batch,), device=device)
    blocks = [layer for layer in model if isinstance(layer, _Bottleneck)]
    loss = _cross_entropy(device, targets, classes_first=True)
    return Training(_Autocast(model, device), (images,), loss, blocks)


def u_net(device: torch.device, small: bool) -> Training:
    """The U-Net of 2015, 16 pictures of 256 × 256."""
    batch, size = (1, 32) if small else (16, 256)
    model = UNet()
    images = torch.rand(batch, 3, size, size, device=device)
    targets = torch.randint(0, 2, (batch, size, size), device=device)
    loss = _cross_entropy(device, targets, classes_first=True)
    return Training(_Autocast(model, device), (images,), loss, [*model.down, *model.up])


JOBS: dict[str, Callable[[torch.device, bool], Training]] = {
    "gpt2-medium": gpt2_medium,
    "llama-1b": llama_1b,
    "resnet-50": resnet_50,
    "u-net": u_net,
}


def build(name: str, device: torch.device, *, small: bool = False) -> Training:
    """The job called `name` in training mode, from one seed; `small` for a try on a CPU."""
    torch.manual_seed(SEED)
    with device:
        training = JOBS[name](device, small)
    training.module.train()
    return training
