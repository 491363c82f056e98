"""Stand-in for each of Apex's softmaxes with a scale and a mask, imported under its own name: the
result; the gradient is written over the gradient.

Source: NVIDIA/apex, `csrc/megatron/*_softmax*.{cpp,h,cu}` (`fwd_cuda`, `bwd_cuda`).
"""

from __future__ import annotations

import torch

from memplan.capturing.standins.extension_names import Extension
from memplan.capturing.standins.rules import Call

_THREADS, _WARP = 128, 32


_rule = Extension(__name__, "NVIDIA/apex, csrc/megatron")


@_rule
def forward(call: Call, x: torch.Tensor, *_more: object) -> torch.Tensor:
    return torch.empty_like(x)


@_rule
def backward(call: Call, grad: torch.Tensor, results: torch.Tensor, scale: object) -> torch.Tensor:
    return grad


def get_batch_per_block(queries: int, keys: int, *_more: int) -> int:
    power = 1 << max(0, keys - 1).bit_length()
    return _THREADS // min(power, _WARP) * (2 if power <= _THREADS else 1)
