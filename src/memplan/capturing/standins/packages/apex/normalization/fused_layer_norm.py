"""Fused normalisation: mean and inverse deviation of each row are kept, in fp32.

Source: NVIDIA/apex, `csrc/layer_norm_cuda.cpp`, `csrc/layer_norm_cuda_kernel.cu`: the backward
pass stages partial sums of 16 parts for the gradients of weight and bias. With `memory_efficient`
the output is kept instead of the input, of the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memplan.capturing.standins.rules import Call, Rule

_SOURCE = "NVIDIA/apex, csrc/layer_norm_cuda_kernel.cu"
_PARTS = 16


def _forward(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    centred: bool,
    columns: int,
) -> torch.Tensor:
    x = x.contiguous()
    rows = x.numel() // columns
    out = torch.empty_like(x)
    kept = [x.new_empty(rows, dtype=torch.float32) for _ in range(2 if centred else 1)]
    call.save(x, weight, bias, *kept)
    return out


def _backward(call: Call, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias = call.saved[:3]
    gradient = gradient.contiguous()
    made = [torch.empty_like(x)]
    for tensor in (weight, bias):
        if tensor is not None:
            call.workspace(_PARTS * tensor.numel() * 4)
            made.append(torch.empty_like(tensor))
    return tuple(made)


_norm = Rule("apex.normalization", _forward, _SOURCE)
_norm.backward(_backward)


class _Function:
    """The part of `torch.autograd.Function` that callers use. They look at `forward`, too, to learn
    whether this apex has `memory_efficient`."""

    forward: Callable[..., torch.Tensor]

    @classmethod
    def apply(cls, *args: Any) -> torch.Tensor:
        return cls.forward(None, *args)


class FusedLayerNormAffineFunction(_Function):
    """Normalisation with weight and bias."""

    @staticmethod
    def forward(
        ctx: None,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Any,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        made: torch.Tensor = _norm(input, weight, bias, True, torch.Size(normalized_shape).numel())
        return made


class FastLayerNormFN(_Function):
    """Normalisation for chosen widths."""

    @staticmethod
    def forward(
        ctx: None,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        made: torch.Tensor = _norm(x, gamma, beta, True, gamma.numel())
        return made


class _Norm(nn.Module):
    centred = True

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        self.normalized_shape = torch.Size(shape)
        self.eps = eps
        self.weight = (
            nn.Parameter(torch.ones(self.normalized_shape)) if elementwise_affine else None
        )
        with_bias = elementwise_affine and self.centred
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape)) if with_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.normalized_shape.numel()
        made: torch.Tensor = _norm(x, self.weight, self.bias, self.centred, columns)
        return made


class FusedLayerNorm(_Norm):
    """Layer normalisation."""


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer normalisation with parameters of another dtype."""


class FusedRMSNorm(_Norm):
    """Root-mean-square normalisation."""

    centred = False


class MixedFusedRMSNorm(FusedRMSNorm):
    """Root-mean-square normalisation with parameters of another dtype."""
