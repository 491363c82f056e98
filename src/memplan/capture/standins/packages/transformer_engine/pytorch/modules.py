"""Linear layers and normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from . import fp8, functions

_GEMM_TENSORS = 3
"""Input, weight, output: entries of a history for each product, and two in the backward pass."""


class _Fp8Module(nn.Module):
    """Keeps the history of largest values, made at the first call in an fp8 region."""

    products = 1

    def _in_fp8(self, device: torch.device) -> bool:
        recipe = fp8.recipe()
        if recipe is None:
            return False
        if not hasattr(self, "_histories"):
            length = getattr(recipe, "amax_history_len", 1)
            self._histories = [
                torch.zeros(length, number * self.products, device=device)
                for number in (_GEMM_TENSORS, 2)
            ]
            self._scales = [
                torch.ones(number * self.products, device=device)
                for number in (_GEMM_TENSORS, 2)
                for _ in range(2)
            ]
        return True


def _device(device: Any) -> Any:
    return "cuda" if device is None else device


class Linear(_Fp8Module):
    """A linear layer; its parameters are born on the device."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **_more: Any,
    ) -> None:
        super().__init__()
        dtype = params_dtype or torch.get_default_dtype()
        place = _device(device)
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=place)
        )
        self.bias = (
            nn.Parameter(torch.zeros(out_features, dtype=dtype, device=place)) if bias else None
        )

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        del is_first_microbatch
        return product(self, inp, self.weight, self.bias)


def product(
    module: _Fp8Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """A product in fp8 where that is on, in autocast's dtype where that is."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    made: torch.Tensor = functions.linear(x, weight, bias, module._in_fp8(x.device))
    return made


class _Norm(nn.Module):
    centred = True

    def __init__(
        self,
        hidden_size: Any,
        eps: float = 1e-5,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **more: Any,
    ) -> None:
        super().__init__()
        dtype = params_dtype or more.get("dtype") or torch.get_default_dtype()
        place = _device(device)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=place))
        self.bias = None
        if self.centred:
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=place))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functions.norm(x, self.weight, self.bias)
        return made


class LayerNorm(_Norm):
    """Layer normalisation."""


class RMSNorm(_Norm):
    """Root-mean-square normalisation."""

    centred = False


def _norm_of(kind: str) -> type[_Norm]:
    return RMSNorm if kind == "RMSNorm" else LayerNorm


class LayerNormLinear(_Fp8Module):
    """Normalisation and a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        return_layernorm_output: bool = False,
        **_more: Any,
    ) -> None:
        super().__init__()
        self.norm = _norm_of(normalization)(in_features, eps, params_dtype, device)
        self.linear = Linear(in_features, out_features, bias, params_dtype, device)
        self.return_layernorm_output = return_layernorm_output

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = self.norm(inp)
        out = self.linear(normed, is_first_microbatch)
        return (out, normed) if self.return_layernorm_output else out


class LayerNormMLP(_Fp8Module):
    """Normalisation, two linear layers and what is between them."""

    products = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **_more: Any,
    ) -> None:
        super().__init__()
        self.activation = activation
        gated = activation in ("swiglu", "geglu", "reglu")
        wide = (2 if gated else 1) * ffn_hidden_size
        self.norm = _norm_of(normalization)(hidden_size, eps, params_dtype, device)
        self.fc1 = Linear(hidden_size, wide, bias, params_dtype, device)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, params_dtype, device)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        inner = self.fc1(self.norm(inp), is_first_microbatch)
        out: torch.Tensor = self.fc2(_activate(inner, self.activation), is_first_microbatch)
        return out


_Activation = Callable[[torch.Tensor], torch.Tensor]
_PLAIN: dict[str, _Activation] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
_GATED: dict[str, _Activation] = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}


def _activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind in _GATED:
        gate, up = x.chunk(2, dim=-1)
        return _GATED[kind](gate) * up
    return _PLAIN.get(kind, F.gelu)(x)
