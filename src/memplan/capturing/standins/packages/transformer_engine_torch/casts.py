"""Casts between high precision and FP8.

Source: Transformer Engine 2.20.2, `pytorch/csrc/extensions/{cast,transpose,recipe}.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan.capturing.standins.extension_names import transformer_engine
from memplan.capturing.standins.launch import record
from memplan.capturing.standins.packages.transformer_engine_torch.enums import TORCH, DType
from memplan.capturing.standins.packages.transformer_engine_torch.quantized import (
    create,
    quantize_into,
    shape_of,
)
from memplan.capturing.standins.rules import Call

_cast = transformer_engine("cast.cpp, pytorch/csrc/quantizer.cpp")
_transpose = transformer_engine("transpose.cpp")
_recipe = transformer_engine("recipe.cpp")


@_cast
def quantize(
    call: Call, tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None
) -> Any:
    """Quantised, into the output where one is given."""
    tensor = tensor.contiguous()
    if output is None:
        output = create(quantizer, tensor.shape, tensor.dtype, tensor.device)
    quantize_into(call, tensor, quantizer, output)
    return output


@_cast
def dequantize(call: Call, tensor: Any, otype: Any) -> torch.Tensor:
    """The tensor in high precision."""
    return torch.empty(shape_of(tensor), dtype=TORCH[DType(int(otype))], device=tensor.device)


@_cast
def create_empty_quantized_tensor(
    call: Call, quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin: bool
) -> Any:
    return create(quantizer, shape, dtype, torch.device(device))


@_cast
def multi_tensor_quantize(
    call: Call, tensors: Sequence[torch.Tensor], quantizers: Sequence[Any]
) -> list[Any]:
    """Each quantised."""
    return [_quantized(call, *pair) for pair in zip(tensors, quantizers, strict=True)]


@_cast
def split_quantize(
    call: Call,
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizers: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Cut by rows, each part quantised."""
    parts = torch.split(tensor, list(split_sections))
    return [_quantized(call, *pair) for pair in zip(parts, quantizers, strict=True)]


def _quantized(call: Call, tensor: torch.Tensor, quantizer: Any) -> Any:
    made = create(quantizer, tensor.shape, tensor.dtype, tensor.device)
    quantize_into(call, tensor, quantizer, made)
    return made


@_transpose
def fp8_transpose(
    call: Call, x: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The last dimension first."""
    if out is None:
        shape = (x.shape[-1], *x.shape[:-1])
        out = torch.empty(shape, dtype=torch.uint8, device=x.device)
    return out


@_transpose
def swap_first_dims(
    call: Call, tensor: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The first two dimensions swapped."""
    tensor = tensor.contiguous()
    first, second, *rest = tensor.shape
    return tensor.new_empty((second, first, *rest)) if out is None else out


@_recipe
def compute_amax(call: Call, tensor: torch.Tensor, amax: torch.Tensor) -> None:
    """Writes the largest magnitude."""
    record("transformer_engine.compute_amax", [tensor, amax], [amax])


@_recipe
def fused_amax_and_scale_update_after_reduction(
    call: Call, reduced: torch.Tensor, histories: Any, scales: Any, *_more: Any
) -> None:
    """Rolls the histories and sets the scales."""
    written = [*histories, *scales]
    record("transformer_engine.amax_and_scale_update", [reduced, *written], written)
