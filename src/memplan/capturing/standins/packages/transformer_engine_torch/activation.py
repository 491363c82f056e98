"""Activations, alone, gated, and with the gradient of a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.capturing.standins.extension_names import ExtensionFunction, transformer_engine
from memplan.capturing.standins.packages.transformer_engine_torch.quantized import (
    create,
    quantize_into,
    writes_directly,
)
from memplan.capturing.standins.rules import Call

_rule = transformer_engine("activation.cpp")
_bias = transformer_engine("bias.cpp")
_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "situglu", "clamped_swiglu")
_SCALED = ("swiglu", "situglu", "clamped_swiglu", "srelu")


def _made(call: Call, shape: Any, like: torch.Tensor, quantizer: Any) -> Any:
    out = create(quantizer, shape, like.dtype, like.device)
    if not writes_directly(quantizer, "activation"):
        quantize_into(
            call, torch.empty(shape, dtype=like.dtype, device=like.device), quantizer, out
        )
    return out


def _forward(parts: int) -> Callable[..., Any]:
    def forward(call: Call, x: torch.Tensor, quantizer: Any, *_more: Any, **_named: Any) -> Any:
        x = x.contiguous()
        return _made(call, (*x.shape[:-1], x.shape[-1] // parts), x, quantizer)

    return forward


def _backward(
    call: Call,
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Any,
    *_more: Any,
    **_named: Any,
) -> Any:
    grad, fwd_input = grad.contiguous(), fwd_input.contiguous()
    return _made(call, fwd_input.shape, fwd_input, quantizer)


def _scaled(parts: int) -> Callable[..., Any]:
    def forward(
        call: Call,
        x: torch.Tensor,
        act_scales: torch.Tensor,
        quantizer: Any,
        *_more: Any,
        **_named: Any,
    ) -> Any:
        x, act_scales = x.contiguous(), act_scales.contiguous()
        return _made(call, (*x.shape[:-1], x.shape[-1] // parts), x, quantizer)

    return forward


def _scaled_backward(
    call: Call,
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    *_more: Any,
    compute_scale_grad: bool = True,
    **_named: Any,
) -> tuple[Any, torch.Tensor | None]:
    grad, fwd_input = grad.contiguous(), fwd_input.contiguous()
    scales = torch.empty_like(act_scales) if compute_scale_grad else None
    return _made(call, fwd_input.shape, fwd_input, quantizer), scales


def _bias_and_activation(
    call: Call, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any
) -> list[Any]:
    grad, fwd_input = grad.contiguous(), fwd_input.contiguous()
    out = create(quantizer, fwd_input.shape, grad.dtype, grad.device)
    bias = torch.empty(fwd_input.shape[-1], dtype=grad.dtype, device=grad.device)
    if not writes_directly(quantizer, "activation") or quantizer is None:
        before = torch.empty(fwd_input.shape, dtype=grad.dtype, device=grad.device)
        if quantizer is not None:
            quantize_into(call, before, quantizer, out)
    return [bias, out]


@_bias
def bgrad_quantize(call: Call, grad: torch.Tensor, quantizer: Any) -> list[Any]:
    """Gradient of a bias, and the gradient that it was summed from, quantised."""
    grad = grad.contiguous()
    bias = torch.empty(grad.shape[-1], dtype=grad.dtype, device=grad.device)
    if quantizer is None:
        return [bias, grad]
    out = create(quantizer, grad.shape, grad.dtype, grad.device)
    quantize_into(call, grad, quantizer, out)
    return [bias, out]


def functions() -> dict[str, ExtensionFunction]:
    made: dict[str, ExtensionFunction] = {"bgrad_quantize": bgrad_quantize}
    for name in (*_PLAIN, *_GATED):
        parts = 2 if name in _GATED else 1
        backward = name.replace("swiglu", "dswiglu") if name.startswith("clamped") else f"d{name}"
        made[name] = _rule.named(name, _forward(parts))
        made[backward] = _rule.named(backward, _backward)
        if name in _SCALED:
            made[f"scaled_{name}"] = _rule.named(f"scaled_{name}", _scaled(parts))
            scaled = f"scaled_{backward}"
            made[scaled] = _rule.named(scaled, _scaled_backward)
        if name in _PLAIN:
            made[f"dbias_d{name}"] = _bias.named(f"dbias_d{name}", _bias_and_activation)
    return made
