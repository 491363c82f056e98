"""What the kernels of `fused_mlp` take, as its (imagined) sources say."""

from __future__ import annotations

from typing import Any

import torch

import memplan


@memplan.register_rule("fused_mlp.forward", source="fused_mlp 0.3, csrc/forward.cu")
def forward(call: Any, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Keeps the input and, for each row, one byte of activation mask a unit; the hidden values are
    computed again in the backward pass. Split-K scratch: up to four fp32 copies of the output."""
    rows = x.numel() // x.shape[-1]
    mask = torch.empty(rows, up.shape[0], dtype=torch.uint8, device=x.device)
    call.workspace(4 * x.numel(), low=0, high=16 * x.numel())
    call.save(x, up, down, mask)
    return torch.empty_like(x)


@forward.backward
def backward(call: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The hidden values again, and their gradient, while the kernel runs."""
    x, up, down, mask = call.saved
    call.workspace(2 * mask.numel() * x.element_size())
    return torch.empty_like(x), torch.empty_like(up), torch.empty_like(down)
