"""Matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch

from memplan.capturing.standins.extension_names import transformer_engine
from memplan.capturing.standins.packages.transformer_engine_torch.enums import TORCH, DType
from memplan.capturing.standins.packages.transformer_engine_torch.quantized import (
    create,
    dtype_of,
    is_fused_output,
    is_quantized,
    shape_of,
)
from memplan.capturing.standins.rules import Call

_rule = transformer_engine("gemm.cpp")


def _matrix(shape: torch.Size) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def product_shape(a: Any, transa: bool, b: Any, transb: bool) -> list[int]:
    """A product's shape in PyTorch's order of dimensions. Raises RuntimeError as the kernel."""
    a_rows, a_columns = _matrix(shape_of(a))
    b_shape = shape_of(b)
    if (a_columns if transa else a_rows) != (_matrix(b_shape)[0] if transb else b_shape[-1]):
        raise RuntimeError(
            f"Invalid matrix dimensions for GEMM (A={tuple(shape_of(a))}, transa={transa}, "
            f"B={tuple(b_shape)}, transb={transb})"
        )
    rows = [b_shape[-1]] if transb else list(b_shape[:-1])
    return [*rows, a_rows if transa else a_columns]


def _swizzled_scales(call: Call, item: Any, by_rows: bool) -> None:
    """Scales of blocks of MXFP8 are copied to the order that the kernel reads."""
    if getattr(item, "_with_gemm_swizzled_scales", True):
        return
    scales = item._rowwise_scale_inv if by_rows else item._columnwise_scale_inv
    if scales is not None:
        call.workspace(scales.numel())


@_rule
def generic_gemm(
    call: Call,
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Product, gradient of the bias, input of GELU, extra output; the workspace is the caller's."""
    shape = product_shape(a, transa, b, transb)
    dtype = dtype_of(a) if output_dtype is None else TORCH[DType(int(output_dtype))]
    device = workspace.device
    if out is None:
        out = create(quantizer, shape, dtype, device)
    unquantized = None
    if quantizer is not None and not is_fused_output(quantizer, a, b):
        unquantized = torch.empty(shape, dtype=dtype, device=device)
    made_dtype = dtype if unquantized is not None or quantizer is None else dtype_of(out)
    for item, by_rows in ((a, transa), (b, not transb)):
        _swizzled_scales(call, item, by_rows)
    bias_grad = contiguous = None
    if bias is not None and grad:
        bias_grad = torch.empty(shape_of(b)[-1], dtype=made_dtype, device=device)
    elif bias is not None:
        contiguous = bias.contiguous()
    before_gelu = None
    if gelu and not grad:
        low = is_quantized(a) or is_quantized(b)
        kept = TORCH[DType(int(bias_type))] if low else made_dtype
        before_gelu = torch.empty(shape, dtype=kept, device=device)
    del contiguous
    return [out, bias_grad, before_gelu, extra_output]
