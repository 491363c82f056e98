"""Softmax, rotary positions, dropout: what is returned, and nothing else.

Source: Transformer Engine 2.20.2, `pytorch/csrc/extensions/{softmax,apply_rope,dropout}.cpp`.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.extension_names import ExtensionFunction, transformer_engine
from memplan.capturing.standins.rules import Call

_softmax = transformer_engine("softmax.cpp")
_rope = transformer_engine("apply_rope.cpp")
_dropout = transformer_engine("dropout.cpp")

_SOFTMAX = ("", "_masked", "_upper_triang_masked", "_aligned_causal_masked")


def _alike(call: Call, x: torch.Tensor, *_more: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


fused_rope_forward = _rope.named("fused_rope_forward", _alike)
fused_rope_backward = _rope.named("fused_rope_backward", _alike)


def _softmax_backward(
    call: Call, output_grads: torch.Tensor, softmax_results: torch.Tensor, scale: float
) -> torch.Tensor:
    grads, softmax_results = output_grads.contiguous(), softmax_results.contiguous()
    return torch.empty_like(grads)


@_rope
def fused_qkv_rope_forward(
    call: Call,
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    split: list[int],
    *_more: Any,
) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values."""
    a, b, groups, _ = qkv.shape
    shapes = ((groups * split[0] // split[1], split[1]), (groups, split[1]), (groups, split[2]))
    return tuple(torch.empty(a, b, *s, dtype=qkv.dtype, device=qkv.device) for s in shapes)


@_rope
def fused_qkv_rope_backward(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_more: Any
) -> torch.Tensor:
    """Packed as in the forward pass."""
    a, b, groups, _ = k.shape
    width = (q.numel() + k.numel() + v.numel()) // (a * b * groups)
    return torch.empty(a, b, groups, width, dtype=q.dtype, device=q.device)


@_dropout
def dropout_fwd(
    call: Call, x: torch.Tensor, dropout_probability: float, out: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Output, and a bit an element."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mask = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)
    torch.empty(2, dtype=torch.int64, device=x.device)
    return [out, mask]


@_dropout
def dropout_bwd(
    call: Call,
    grad_output: torch.Tensor,
    mask: torch.Tensor,
    dropout_probability: float,
    grad_input: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty_like(grad_output) if grad_input is None else grad_input


def softmax_functions() -> dict[str, ExtensionFunction]:
    """Softmax functions of all kinds, by name."""
    made = {}
    for kind in _SOFTMAX:
        forward, backward = f"scaled{kind}_softmax_forward", f"scaled{kind}_softmax_backward"
        made[forward] = _softmax.named(forward, _alike)
        made[backward] = _softmax.named(backward, _softmax_backward)
    return made
