"""Apex's softmax with a scale and a mask: the result; the gradient is written over the gradient.

Source: NVIDIA/apex, `csrc/megatron/*_softmax*.{cpp,h,cu}` (`fwd_cuda`, `bwd_cuda`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memplan.capturing.standins.extension_names import Extension, ExtensionFunction
from memplan.capturing.standins.rules import Call

_THREADS, _WARP = 128, 32


def _forward(call: Call, x: torch.Tensor, *_more: object) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(call: Call, grad: torch.Tensor, results: torch.Tensor, scale: object) -> torch.Tensor:
    return grad


def _batch_per_block(queries: int, keys: int, *_more: int) -> int:
    power = 1 << max(0, keys - 1).bit_length()
    return _THREADS // min(power, _WARP) * (2 if power <= _THREADS else 1)


def functions(
    module: str,
) -> tuple[ExtensionFunction, ExtensionFunction, Callable[..., int]]:
    """`forward`, `backward` and `get_batch_per_block` of one of the extensions."""
    rule = Extension(module, "NVIDIA/apex, csrc/megatron")
    forward, backward = rule.named("forward", _forward), rule.named("backward", _backward)
    return forward, backward, _batch_per_block
