"""Attention and whole layers, on (sequence, batch, hidden) unless told otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from .modules import LayerNormLinear, LayerNormMLP, Linear


class DotProductAttention(nn.Module):
    """Fused attention on (sequence, batch, heads, head size), or with `bshd` batch first."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        **_more: Any,
    ) -> None:
        super().__init__()
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.dropout = attention_dropout
        self.format = qkv_format
        self.causal = "causal" in attn_mask_type
        del kv_channels

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_more: Any,
    ) -> torch.Tensor:
        batch_first = self.format == "bshd"
        order = (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)
        q, k, v = (t.permute(order) for t in (query_layer, key_layer, value_layer))
        dropout = self.dropout if self.training else 0.0
        grouped = self.groups != self.heads
        out = F.scaled_dot_product_attention(
            q, k, v, attention_mask, dropout, self.causal and attention_mask is None,
            enable_gqa=grouped,
        )  # fmt: skip
        back = (0, 2, 1, 3) if batch_first else (2, 0, 1, 3)
        return out.permute(back).flatten(2)


class MultiheadAttention(nn.Module):
    """Normalisation, queries, keys and values in one product, attention, projection."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        num_gqa_groups: int | None = None,
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        qkv_format: str = "sbhd",
        device: Any = None,
        **more: Any,
    ) -> None:
        super().__init__()
        self.heads = num_attention_heads
        self.groups = num_gqa_groups or num_attention_heads
        self.size = kv_channels or hidden_size // num_attention_heads
        wide = (self.heads + 2 * self.groups) * self.size
        options = {"bias": bias, "params_dtype": params_dtype, "device": device}
        if input_layernorm:
            self.qkv: nn.Module = LayerNormLinear(
                hidden_size, wide, normalization=normalization, **options
            )
        else:
            self.qkv = Linear(hidden_size, wide, **options)
        self.attention = DotProductAttention(
            self.heads,
            self.size,
            self.groups,
            attention_dropout,
            qkv_format,
            more.get("attn_mask_type") or more.get("self_attn_mask_type") or "causal",
        )
        self.proj = Linear(self.heads * self.size, hidden_size, **options)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        **_more: Any,
    ) -> torch.Tensor:
        mixed = self.qkv(hidden_states, is_first_microbatch)
        parts = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in mixed.split(parts, dim=-1))
        out: torch.Tensor = self.proj(self.attention(q, k, v, attention_mask))
        return out


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each added to what came in."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        self_attn_mask_type: str = "causal",
        normalization: str = "LayerNorm",
        bias: bool = True,
        activation: str = "gelu",
        params_dtype: torch.dtype | None = None,
        attn_input_format: str = "sbhd",
        device: Any = None,
        kv_channels: int | None = None,
        **_more: Any,
    ) -> None:
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            num_gqa_groups,
            input_layernorm=True,
            normalization=normalization,
            bias=bias,
            params_dtype=params_dtype,
            qkv_format=attn_input_format,
            device=device,
            self_attn_mask_type=self_attn_mask_type,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            bias,
            normalization,
            activation,
            params_dtype,
            device,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        **_more: Any,
    ) -> torch.Tensor:
        attended = self.self_attention(hidden_states, attention_mask, is_first_microbatch)
        hidden = self._added(attended, hidden_states)
        return self._added(self.layernorm_mlp(hidden, is_first_microbatch), hidden)

    def _added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.hidden_dropout > 0 and self.training:
            x = F.dropout(x, self.hidden_dropout)
        return x + residual
