"""LayerNorm and RMSNorm, forward and backward.

The backward kernels sum the gradients of the weights in as many parts as thread blocks run at
once: multiprocessors times blocks that fit on one, which depends on the compiled kernel's
registers. Its blocks have 128 threads (256 from 6,144 columns of LayerNorm on): two fit where a
thread takes all 255 registers, eight where it takes 64.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memplan.capturing.standins.extension_names import transformer_engine
from memplan.capturing.standins.packages.transformer_engine_torch.enums import TORCH, DType
from memplan.capturing.standins.packages.transformer_engine_torch.quantized import (
    create,
    quantize_into,
    writes_directly,
)
from memplan.capturing.standins.rules import Call

_rule = transformer_engine(
    "normalization.cpp, common/normalization/{layernorm,rmsnorm}/*_bwd_semi_cuda_kernel.cu"
)
_FLOAT = 4
_BLOCKS_LOW, _BLOCKS, _BLOCKS_HIGH = 1, 2, 8
_ROWS_OF_A_BLOCK = 4


def _statistic(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(math.prod(x.shape[:-1]), dtype=torch.float32, device=x.device)


def _forward(
    call: Call, x: torch.Tensor, statistics: int, out: Any, quantizer: Any, otype: Any
) -> tuple[Any, list[torch.Tensor]]:
    kept = [_statistic(x) for _ in range(statistics)]
    dtype = TORCH[DType(int(otype))]
    if out is None:
        out = create(quantizer, x.shape, dtype, x.device)
    if not writes_directly(quantizer, "norm"):
        normed = torch.empty(x.shape, dtype=dtype, device=x.device)
        quantize_into(call, normed, quantizer, out)
    return out, kept


def _parts(call: Call, x: torch.Tensor, sm_margin: int, gradients: int) -> None:
    """Partial sums of the gradients of weight and bias."""
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count - sm_margin
    rows = max(1, -(-math.prod(x.shape[:-1]) // _ROWS_OF_A_BLOCK))
    part = x.shape[-1] * _FLOAT * gradients

    def size(blocks: int) -> int:
        return min(processors * blocks, max(rows, processors)) * part

    call.workspace(
        size(_BLOCKS), low=min(rows, processors * _BLOCKS_LOW) * part, high=size(_BLOCKS_HIGH)
    )


@_rule
def layernorm_fwd(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Output, mean and inverse deviation of each row."""
    out, kept = _forward(call, x, 2, ln_out, quantizer, otype)
    return [out, *kept]


@_rule
def rmsnorm_fwd(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Output, nothing, inverse root mean square of each row."""
    out, kept = _forward(call, x, 1, ln_out, quantizer, otype)
    return [out, None, *kept]


@_rule
def layernorm_bwd(
    call: Call,
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of input, weight and bias."""
    dz, x, gamma = dz.contiguous(), x.contiguous(), gamma.contiguous()
    made = [torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)]
    _parts(call, x, sm_margin, 2)
    return made


@_rule
def rmsnorm_bwd(
    call: Call,
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of input and weight."""
    dz, x, gamma = dz.contiguous(), x.contiguous(), gamma.contiguous()
    made = [torch.empty_like(x), torch.empty_like(gamma)]
    _parts(call, x, sm_margin, 1)
    return made


@_rule
def rmsnorm_bwd_add(
    call: Call,
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """`rmsnorm_bwd` plus another gradient."""
    dz, x, add, gamma = dz.contiguous(), x.contiguous(), add.contiguous(), gamma.contiguous()
    made = [torch.empty_like(x), torch.empty_like(gamma)]
    _parts(call, x, sm_margin, 1)
    return made
