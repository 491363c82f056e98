"""Kernels of `bitsandbytes` whose shape rule does not show what they take for themselves.

Source: bitsandbytes 0.50.2, `backends/cuda/ops.py` (`gemm_4bit`, `_dequant_linear_fallback`, those
of int8) and `backends/default/ops.py` (`int8_scaled_mm`, `int8_mixed_scaled_mm`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.standins.rules import Call, Rule, running

_ROWS_ALWAYS_FUSED, _ROWS_EVER_FUSED = 4, 1536
_FLOAT = 4
_COLUMNS = 4


def _gemm_4bit(
    call: Call,
    a: torch.Tensor,
    b: torch.Tensor,
    shape: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fused for few rows; for more than 1,536 the weight is dequantised in whole first. Between,
    the choice depends on card and shape: a bound."""
    rows = a.numel() // a.shape[-1]
    if rows > _ROWS_ALWAYS_FUSED:
        whole = math.prod(shape) * a.element_size()
        if absmax_8bit is not None:
            whole += 2 * absmax_8bit.numel() * _FLOAT
        call.workspace(whole, low=whole if rows > _ROWS_EVER_FUSED else 0)
    return a.new_empty((*a.shape[:-1], shape[0]))


def _int8_scaled_mm(
    _call: Call,
    a: torch.Tensor,
    b: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A times the transposed B: in int32, then in float16, then in the dtype that is asked for.
    cuBLAS takes columns in fours: others are multiplied in float32 first."""
    product = a.new_empty((*a.shape[:-1], b.shape[0]), dtype=torch.int32)
    if a.shape[-1] % _COLUMNS:
        torch.matmul(a.float(), b.float().t()).to(torch.int32)
    made = torch.empty_like(product, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        made.add_(bias)
    return made.to(dtype or torch.float16)


def _int8_mixed_scaled_mm(
    call: Call,
    a: torch.Tensor,
    ca: torch.Tensor,
    cb: torch.Tensor,
    sca: torch.Tensor,
    scb: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with columns of outliers apart, of which there are none."""
    return _int8_scaled_mm(call, ca, cb, sca, scb, bias, a.dtype), a.new_empty(0)


def _int8_vectorwise_quant(
    _call: Call, a: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One byte an element, one fp32 scale a row. Columns with an element above `threshold` are
    looked for where it is not 0; none is taken to be found."""
    rows = a.new_empty(math.prod(a.shape[:-1]), dtype=torch.float32)
    quantised = torch.empty_like(a, dtype=torch.int8)
    if threshold <= 0:
        return quantised, rows, None
    outliers = a.abs() >= threshold
    outliers.any()
    return quantised, rows, a.new_empty(0, dtype=torch.int64)


def _int8_double_quant(
    call: Call, a: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """By rows as `int8_vectorwise_quant`, and by columns; then the scales of both."""
    by_rows, rows, outliers = _int8_vectorwise_quant(call, a, threshold)
    columns, mask = _largest_of_columns(a, threshold)
    if mask is not None:
        a = a.masked_fill(mask, 0.0)
    by_columns = torch.round(a.mul(127.0) / columns.unsqueeze(0)).to(torch.int8)
    return by_rows, by_columns, rows, columns.flatten(), outliers


def _largest_of_columns(
    a: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    mask, largest = None, a.abs().view(-1, a.shape[-1])
    if threshold > 0:
        mask = largest >= threshold
        largest.masked_fill_(mask, 0.0)
    return largest.amax(dim=0).float(), mask


RULES = tuple(
    Rule(f"bitsandbytes::{function.__name__[1:]}", function, "bitsandbytes 0.50.2, backends")
    for function in (
        _gemm_4bit,
        _int8_scaled_mm,
        _int8_mixed_scaled_mm,
        _int8_vectorwise_quant,
        _int8_double_quant,
    )
)
gemm_4bit, int8_scaled_mm, int8_mixed_scaled_mm, int8_vectorwise_quant, int8_double_quant = RULES


def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
    """A state of a paged optimizer, in CUDA's unified memory: it moves to the host under pressure,
    and is counted there."""
    state = running()
    if state is None:
        return torch.zeros(shape, dtype=dtype)
    made: Any = state.blank(shape, dtype, "cpu")
    state.assumptions.add(
        "paged", "states of paged optimizers are in unified memory, and counted on the host"
    )
    made.is_paged = True
    made.page_deviceid = getattr(device, "index", 0)
    tensor: torch.Tensor = made
    return tensor


def adapt_functional(patches: Patches, module: Any) -> None:
    """Adapt an installed bitsandbytes: unified memory would need a driver."""
    patches.set(module, "get_paged", paged)
    patches.set(module, "fill", lambda *_args, **_kwargs: None)
    patches.set(module, "prefetch_tensor", lambda *_args, **_kwargs: None)
