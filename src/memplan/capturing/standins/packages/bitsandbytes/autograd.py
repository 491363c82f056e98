"""Products with quantised weights.

Source: bitsandbytes 0.50.2, `autograd/_functions.py` and `backends/{default,cuda}/ops.py`: of the
4-bit product nothing is kept but the weight, which the backward pass dequantises; of the 8-bit
product the input, too, and where the weight is trained the input in 8 bits by columns. Version
0.42.0 keeps the input of the 4-bit product as well, and dequantises the whole weight.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.finder import EARLIER, version_of
from memplan.capturing.standins.kernels import bitsandbytes as kernels

from . import functional as F  # noqa: N812

_KEEPS_INPUT = version_of("bitsandbytes") == EARLIER["bitsandbytes"]


class MatmulLtState:
    """What a layer in 8 bits carries along."""

    def __init__(self) -> None:
        self.CB: torch.Tensor | None = None
        self.SCB: torch.Tensor | None = None
        self.threshold = 0.0
        self.has_fp16_weights = True
        self.is_training = True
        self.use_pool = False
        self.idx: torch.Tensor | None = None

    def reset_grads(self) -> None:
        self.CB = self.SCB = None


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, out: Any, bias: Any, state: Any) -> Any:
        if _KEEPS_INPUT:
            ctx.input = a if any(ctx.needs_input_grad[:2]) else None
        b = b.view(-1, 1)
        ctx.state, ctx.weight = state, b if any(ctx.needs_input_grad[:2]) else None
        ctx.dtypes = a.dtype, None if bias is None else bias.dtype
        if _KEEPS_INPUT:
            return torch.nn.functional.linear(a, F.dequantize_4bit(b, state).to(a.dtype), bias)
        second = state.state2
        nested = (state.absmax, second.code, state.offset) if second is not None else ()
        largest = state.absmax if second is None else second.absmax
        tail = (state.blocksize, state.quant_type, bias, *nested)
        made = kernels.gemm_4bit(a, b, list(state.shape), largest, *tail)
        return made if out is None else out.copy_(made)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        of_a = of_bias = None
        if ctx.needs_input_grad[3]:
            of_bias = gradient.sum(tuple(range(gradient.dim() - 1)), dtype=ctx.dtypes[1])
        if ctx.needs_input_grad[0]:
            weight = F.dequantize_4bit(ctx.weight, ctx.state).to(gradient.dtype)
            of_a = torch.matmul(gradient, weight)
        return of_a, None, None, of_bias, None


class MatMul8bitLt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, out: Any, bias: Any, state: Any) -> Any:
        shape = a.shape
        flat = a.reshape(-1, shape[-1])
        half = flat.to(torch.float16)
        if ctx.needs_input_grad[1]:
            codes, by_columns, rows, columns, _ = F.int8_double_quant(half, state.threshold)
            ctx.by_columns = by_columns, columns
        else:
            codes, rows, _ = F.int8_vectorwise_quant(half, state.threshold)
        del half
        known = state.CB is not None and state.SCB is not None
        if not known or (state.has_fp16_weights and state.is_training and b.grad is None):
            state.reset_grads()
            state.CB, state.SCB, _ = F.int8_vectorwise_quant(b.to(torch.float16))
        made = F.int8_scaled_mm(codes, state.CB, rows, state.SCB, bias, flat.dtype)
        ctx.state, ctx.shape, ctx.dtypes = state, shape, (a.dtype, getattr(bias, "dtype", None))
        ctx.input = flat if any(ctx.needs_input_grad[:2]) else None
        return made.reshape(*shape[:-1], made.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        of_a = of_b = of_bias = None
        flat = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[3]:
            of_bias = flat.sum(0, dtype=ctx.dtypes[1])
        if ctx.needs_input_grad[1]:
            _, by_columns, _, columns, _ = F.int8_double_quant(flat.to(torch.float16))
            codes, scales = ctx.by_columns
            of_b = F.int8_scaled_mm(by_columns.t().contiguous(), codes.t(), columns, scales)
        if ctx.needs_input_grad[0]:
            scales = ctx.state.SCB.unsqueeze(1).mul(1.0 / 127.0)
            weight = ctx.state.CB.to(ctx.dtypes[0], copy=True).mul_(scales)
            of_a = torch.matmul(flat.to(ctx.dtypes[0]), weight).view(ctx.shape)
        return of_a, of_b, None, of_bias, None


def matmul_4bit(
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    quant_state: F.QuantState,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A times the transposed weight."""
    made: torch.Tensor = MatMul4Bit.apply(A, B, out, bias, quant_state)  # type: ignore[no-untyped-call]
    return made


def matmul(
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    out: torch.Tensor | None = None,
    state: MatmulLtState | None = None,
    threshold: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A times the transposed weight, in 8 bits."""
    state = state or MatmulLtState()
    state.threshold = threshold or state.threshold
    made: torch.Tensor = MatMul8bitLt.apply(A, B, out, bias, state)  # type: ignore[no-untyped-call]
    return made
