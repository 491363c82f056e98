"""Modules of Transformer Engine, and its fp8 region."""

from __future__ import annotations

from .fp8 import autocast, fp8_autocast, fp8_model_init, is_fp8_available
from .modules import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from .transformer import DotProductAttention, MultiheadAttention, TransformerLayer

__all__ = [
    "DotProductAttention",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerLayer",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "is_fp8_available",
]
