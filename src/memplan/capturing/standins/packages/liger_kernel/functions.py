"""What Liger's functions make and keep.

Source: Liger-Kernel 0.8.5, `ops/fused_linear_cross_entropy.py`, `ops/cross_entropy.py`,
`ops/rms_norm.py`, `ops/swiglu.py`, `ops/rope.py`. Sizes are exact.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.rules import Call, Rule

_HALF = (torch.float16, torch.bfloat16)


def _source(file: str) -> str:
    return f"Liger-Kernel 0.8.5, ops/{file}.py"


def _fused_linear_cross_entropy(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Logits exist for a part of the tokens at a time: about as many values as the hidden states
    have. Gradients are computed here and kept."""
    tokens, hidden = x.shape
    increase = -(-weight.shape[0] // hidden)
    rows = min(1 << max(-(-tokens // increase) - 1, 0).bit_length(), tokens)
    wants = call.needs_grad
    grad_x = torch.zeros_like(x)
    grads: list[torch.Tensor | None] = [None, None]
    if any(wants):
        if wants[1]:
            grads[0] = torch.zeros_like(weight, dtype=accum_dtype)
        if bias is not None:
            grads[1] = torch.zeros_like(bias, dtype=accum_dtype)
    losses = torch.zeros(tokens, dtype=torch.float32, device=x.device)
    valid = target != -100
    count = valid.sum()
    _in_parts(x, weight, bias, rows, bool(any(wants)), grads[0])
    total = losses if reduction == "none" else torch.sum(losses)
    if grads[0] is not None:
        grads[0] = grads[0].to(weight.dtype)
    call.save(grad_x, *grads, bias is not None)
    del count
    return total


def _in_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    wants: bool,
    grad_weight: torch.Tensor | None,
) -> None:
    plain = not torch.is_autocast_enabled("cuda") and x.dtype == weight.dtype
    held = x.new_empty((rows, weight.shape[0])) if plain else None
    for start in range(0, x.shape[0], rows):
        part = x[start : start + rows]
        logits = held if held is not None else part @ weight.t()
        if bias is not None and held is None:
            logits = logits + bias
        if wants and held is None:
            torch.mm(logits, weight)
        if grad_weight is None or not wants:
            continue
        same = grad_weight.dtype == logits.dtype
        if not (logits.dtype in _HALF and (same or grad_weight.dtype == torch.float32)):
            torch.mm(logits[: part.shape[0]].t(), part.to(logits.dtype)).float()
        elif part.dtype != logits.dtype:
            part.to(logits.dtype)


def _of_fused_linear(call: Call, gradient: torch.Tensor) -> tuple[Any, ...]:
    grad_x, grad_weight, grad_bias, biased = call.saved
    return (grad_x, grad_weight, None, *((grad_bias,) if biased else ()))


fused_linear_cross_entropy = Rule(
    "liger_kernel.fused_linear_cross_entropy",
    _fused_linear_cross_entropy,
    _source("fused_linear_cross_entropy"),
)
fused_linear_cross_entropy.backward(_of_fused_linear)


def _cross_entropy(
    call: Call, logits: torch.Tensor, target: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """The gradient is written over the logits."""
    losses = torch.zeros(logits.shape[0], dtype=logits.dtype, device=logits.device)
    call.save(logits.detach())
    return losses if reduction == "none" else torch.sum(losses)


cross_entropy = Rule("liger_kernel.cross_entropy", _cross_entropy, _source("cross_entropy"))
cross_entropy.backward(lambda call, gradient: (call.saved[0], None))


def _rms_norm(call: Call, x: torch.Tensor, weight: torch.Tensor, casting: str) -> torch.Tensor:
    """One root mean square for each row, in fp32 but for casting mode `none`."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.empty_like(rows)
    dtype = x.dtype if casting == "none" else torch.float32
    call.save(rows, weight, rows.new_empty(rows.shape[0], dtype=dtype))
    return y.view(x.shape)


def _of_rms_norm(call: Call, gradient: torch.Tensor) -> tuple[Any, ...]:
    """The input's gradient is written over the incoming one; the weight's is sums of each SM."""
    x, weight, _ = call.saved
    gradient = gradient.contiguous()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    partial = x.new_empty((processors, x.shape[-1]), dtype=torch.float32)
    return gradient, partial.sum(dim=0).to(weight.dtype)


rms_norm = Rule("liger_kernel.rms_norm", _rms_norm, _source("rms_norm"))
rms_norm.backward(_of_rms_norm)


def _silu_mul(call: Call, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both inputs are kept, and the gradients written over them."""
    gate, up = gate.contiguous(), up.contiguous()
    call.save(gate, up)
    return torch.empty_like(gate)


silu_mul = Rule("liger_kernel.silu_mul", _silu_mul, _source("swiglu"))
silu_mul.backward(lambda call, gradient: call.saved)


def _rope(
    call: Call, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Works in place on (batch, sequence, heads, head size)."""
    call.save(cos.contiguous(), sin.contiguous())
    return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))  # type: ignore[return-value]


def _of_rope(call: Call, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (dq, dk))
    return (*turned, None, None)


rope = Rule("liger_kernel.rope", _rope, _source("rope"))
rope.backward(_of_rope)
