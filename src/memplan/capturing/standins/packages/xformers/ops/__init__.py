"""Attention without a matrix of scores, and the gated feed-forward.

Source: xFormers 0.0.35, `ops/fmha/dispatch.py` (flash-attention first, cutlass for biases and
fp32), `ops/fmha/flash.py`, `ops/fmha/cutlass.py`, `ops/swiglu_op.py`. The kernels are those whose
memory is known: flash-attention's, and PyTorch's memory-efficient one, which came from here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from . import fmha
from .fmha import LowerTriangularMask, memory_efficient_attention

__all__ = [
    "LowerTriangularMask",
    "SwiGLU",
    "fmha",
    "memory_efficient_attention",
    "swiglu",
    "unbind",
]


def swiglu(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    w3: torch.Tensor,
    b3: torch.Tensor | None,
    *,
    op: Any = None,
) -> torch.Tensor:
    """SwiGLU in plain operators, as in the package's own eager path."""
    return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w2, b2), w3, b3)


class SwiGLU(nn.Module):
    """The gated feed-forward as a module."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        self.w12: nn.Linear | None = None
        self.w1 = self.w2 = None
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        else:
            self.w1 = nn.Linear(in_features, hidden_features, bias=bias)
            self.w2 = nn.Linear(in_features, hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.w12 is not None:
            gate, up = self.w12(x).chunk(2, dim=-1)
        else:
            assert self.w1 is not None
            assert self.w2 is not None
            gate, up = self.w1(x), self.w2(x)
        out: torch.Tensor = self.w3(F.silu(gate) * up)
        return out


def unbind(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return x.unbind(dim)
