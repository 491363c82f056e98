"""What Transformer Engine's functions make and keep.

Source: Transformer Engine 2.20.2, `pytorch/module/{linear,layernorm_linear,layernorm_mlp,base}.py`,
`pytorch/tensor/float8_tensor.py`. In fp8 a tensor is one byte an element; where the card multiplies
only rows by rows (before capability 10) the backward pass wants it transposed as well. Whether a
transposed weight is made in the forward or later, and kept, is a bound.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capture.standins.rules import Call, Rule

_SOURCE = "Transformer Engine 2.20.2, pytorch/module"
_WORKSPACE, _WORKSPACE_HOPPER = 4 << 20, 32 << 20


def _transposes() -> bool:
    return torch.cuda.get_device_capability()[0] < 10


def _workspace(call: Call) -> torch.Tensor:
    """cuBLAS's, made once and kept by the package."""
    size = _WORKSPACE_HOPPER if torch.cuda.get_device_capability()[0] >= 9 else _WORKSPACE
    return call.workspace(size)


def _fp8(call: Call, tensor: torch.Tensor, *, both: bool) -> torch.Tensor:
    """A tensor in fp8, with its transposed copy where that is needed."""
    count = tensor.numel()
    return call.workspace(2 * count if both and _transposes() else count, low=count)


def _linear(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    fp8: bool,
) -> torch.Tensor:
    _workspace(call)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if not fp8:
        call.save(x, weight, False)
        return out
    x8 = _fp8(call, x, both=True)
    w8 = _fp8(call, weight, both=True)
    call.save(x8, w8, True, x.shape, x.dtype, weight.shape, weight.dtype)
    return out


def _of_linear(call: Call, gradient: torch.Tensor) -> tuple[Any, ...]:
    gradient = gradient.contiguous()
    _workspace(call)
    fp8 = call.saved[2]
    if fp8:
        _fp8(call, gradient, both=True)
        shape, dtype, weight_shape, weight_dtype = call.saved[3:]
    else:
        x, weight, _ = call.saved
        shape, dtype, weight_shape, weight_dtype = x.shape, x.dtype, weight.shape, weight.dtype
    device = gradient.device
    wants = (*call.needs_grad, False)
    of_x = torch.empty(shape, dtype=dtype, device=device) if wants[0] else None
    of_w = torch.empty(weight_shape, dtype=weight_dtype, device=device) if wants[1] else None
    made = [of_x, of_w]
    if len(call.needs_grad) == 3:
        made.append(torch.empty(weight_shape[:1], dtype=weight_dtype, device=device))
    return tuple(made)


linear = Rule("transformer_engine.linear", _linear, f"{_SOURCE}/linear.py")
linear.backward(_of_linear)


def _norm(
    call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Mean and inverse deviation of each row, in fp32; without a bias the latter only."""
    rows = x.numel() // x.shape[-1]
    count = 1 if bias is None else 2
    call.save(x, weight, bias, *(x.new_empty(rows, dtype=torch.float32) for _ in range(count)))
    return torch.empty_like(x)


def _of_norm(call: Call, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Partial sums of the gradients of weight and bias: at most one a processor."""
    x, weight, bias = call.saved[:3]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    made = [torch.empty_like(x), torch.empty_like(weight)]
    call.workspace(processors * weight.numel() * 4, low=0, high=2 * processors * weight.numel() * 4)
    if bias is not None:
        made.append(torch.empty_like(bias))
    return tuple(made)


norm = Rule("transformer_engine.norm", _norm, f"{_SOURCE}/_common.py")
norm.backward(_of_norm)
