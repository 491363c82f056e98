"""The functions of flash-attention 3, over the rules for its kernels.

Saved for the backward pass: q, k, v, the output, the log-sum-exp in fp32; gradients of packed
tensors come packed.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.kernels import flash_attention_3 as kernels
from memplan.capturing.standins.registry import operator_of

_forward, _backward = (operator_of(rule, schema) for rule, schema in kernels.SCHEMAS.items())
_Pair = tuple[int, int]
_Maybe = torch.Tensor | None


def _unpack(packed: Any, heads: int) -> Any:
    """`heads`: of the queries, where they lie beside those of keys and values; 0 where the three
    are stacked; -1 where they are tensors of their own."""
    if heads < 0:
        return packed
    (together,) = packed
    if not heads:
        return together.unbind(-3)
    groups = (together.shape[-2] - heads) // 2
    return together.split([heads, groups, groups], -2)


class _Attention(torch.autograd.Function):
    """All variants: what is passed in is unpacked, its gradients come packed alike."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: tuple[Any, ...],
        lengths: tuple[Any, ...],
        heads: int,
        return_lse: bool,
        cu_q: _Maybe,
        cu_k: _Maybe,
        used_q: _Maybe,
        used_k: _Maybe,
        *packed: torch.Tensor,
    ) -> Any:
        q, k, v = (tensor.detach() for tensor in _unpack(packed, heads))
        scale, causal, (left, right), softcap, deterministic, splits = settings
        where = (cu_q, cu_k, None, used_q, used_k, *lengths)
        tail = (scale, causal, left, right, 0, softcap, True, None, splits)
        out, lse, _, _ = _forward(q, k, v, None, None, None, None, *where, *(None,) * 9, *tail)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, used_q, used_k)
        ctx.lengths, ctx.heads, ctx.shapes = lengths, heads, [item.shape for item in packed]
        ctx.tail = (scale, causal, left, right, softcap, deterministic)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_unused: Any) -> Any:
        q, k, v, out, lse, *where = ctx.saved_tensors
        packed = tuple(q.new_empty(shape) for shape in ctx.shapes)
        gradients = _unpack(packed, ctx.heads)
        _backward(dout, q, k, v, out, lse, *gradients, *where, *ctx.lengths, *ctx.tail)
        return (None,) * 8 + packed


def _attend(
    packed: tuple[torch.Tensor, ...],
    settings: tuple[Any, ...],
    return_lse: bool,
    sequences: tuple[_Maybe, ...] = (None,) * 4,
    lengths: tuple[Any, ...] = (None, None),
    heads: int = -1,
) -> Any:
    scale, *rest = settings
    scale = packed[0].shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(  # type: ignore[no-untyped-call]
        (scale, *rest), lengths, heads, return_lse, *sequences, *packed
    )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: _Maybe = None,
    q_descale: _Maybe = None,
    k_descale: _Maybe = None,
    v_descale: _Maybe = None,
    window_size: _Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q, k, v of (batch, sequence, heads, head size)."""
    settings = (softmax_scale, causal, window_size, softcap, deterministic, num_splits)
    return _attend((q, k, v), settings, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: _Maybe = None,
    k_descale: _Maybe = None,
    v_descale: _Maybe = None,
    window_size: _Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """qkv of (batch, sequence, 3, heads, head size), or (batch, sequence, all heads, head size)."""
    settings = (softmax_scale, causal, window_size, softcap, deterministic, 1)
    heads = 0 if qkv.dim() == 5 else num_heads_q or 0
    return _attend((qkv,), settings, return_attn_probs, heads=heads)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: _Maybe = None,
    seqused_k: _Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: _Maybe = None,
    q_descale: _Maybe = None,
    k_descale: _Maybe = None,
    v_descale: _Maybe = None,
    window_size: _Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q, k, v of (tokens, heads, head size)."""
    settings = (softmax_scale, causal, window_size, softcap, deterministic, num_splits)
    sequences = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    lengths = (max_seqlen_q, max_seqlen_k)
    return _attend((q, k, v), settings, return_attn_probs, sequences, lengths)
