"""Stand-in for the compiled part of causal-conv1d.

Source: causal-conv1d 1.7.0, `csrc/causal_conv1d.cpp`: results are written to what is passed in; a
deterministic backward pass sums the weights' gradients from parts of its own.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from memplan.capturing.kernels.model import ceil_div
from memplan.capturing.standins.extension_names import Extension
from memplan.capturing.standins.launch import record
from memplan.capturing.standins.rules import Call

_rule = Extension("causal_conv1d_cuda", "causal-conv1d 1.7.0, csrc/causal_conv1d.cpp")
_SHORT = 128
_PART, _SHORT_PART = 128, 64


def _deterministic() -> bool:
    said = os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "")[:1]
    return (
        said == "1" if said in ("0", "1") and said else torch.are_deterministic_algorithms_enabled()
    )


def _wrote(name: str, given: tuple[Any, ...], *written: Any) -> None:
    tensors = [item for item in given if isinstance(item, torch.Tensor)]
    outputs = [item for item in written if isinstance(item, torch.Tensor)]
    record(f"causal_conv1d.{name}", [*tensors, *outputs], outputs)


@_rule
def causal_conv1d_fwd(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    final_states: torch.Tensor | None,
    silu_activation: bool,
) -> None:
    """Writes the output, and the last states where they are wanted."""
    _wrote("fwd", (x, weight, bias, seq_idx, initial_states), out, final_states)


@_rule
def causal_conv1d_update(
    call: Call,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *_more: Any,
) -> None:
    """Writes the output and the state."""
    _wrote("update", (x, weight, bias), out, conv_state)


@_rule
def causal_conv1d_bwd(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grad: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    final_grad: torch.Tensor | None,
    x_grad: torch.Tensor,
    weight_grad: torch.Tensor,
    bias_grad: torch.Tensor | None,
    initial_grad: torch.Tensor | None,
    silu_activation: bool,
) -> None:
    """Writes the gradients."""
    batch, channels, length = x.shape
    channels_last = x.stride(1) == 1 and x.stride(2) > 1
    if grad.stride(1 if channels_last else 2) != 1:
        turned = grad.transpose(-1, -2) if channels_last else grad
        grad = turned.contiguous()
    held = []
    if _deterministic():
        part = _SHORT_PART if length <= _SHORT else _PART
        parts = (batch, ceil_div(length, part)) if channels_last else (batch,)
        shapes = [(*parts, channels, weight.shape[-1])]
        shapes += [(*parts, channels)] if bias_grad is not None else []
        held = [grad.new_zeros(shape, dtype=torch.float32) for shape in shapes]
    written = (x_grad, weight_grad, bias_grad, initial_grad)
    _wrote("bwd", (x, weight, bias, grad, seq_idx, initial_states, final_grad), *written)
    for parts_sum, target in zip(held, (weight_grad, bias_grad), strict=False):
        assert target is not None
        target.add_(parts_sum.sum(list(range(parts_sum.dim() - target.dim()))))
