"""The functions of flash-attention 2, over the rules for its kernels.

Saved for the backward pass: q, k, v (padded to a head size of a multiple of 8), the output, the
log-sum-exp in fp32 and 16 bytes of random state; gradients of packed tensors come packed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from memplan.capturing.standins.kernels import flash_attention as kernels
from memplan.capturing.standins.registry import operator_of

_forward, _varlen_forward, _backward, _varlen_backward = (
    operator_of(rule, schema) for rule, schema in kernels.SCHEMAS.items()
)
_HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class _Lengths:
    """Sequences of variable length; absent where all are alike."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest_q: int
    longest_k: int


@dataclass(frozen=True)
class _Options:
    """What every function takes after its tensors."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False

    def for_kernel(self, head: int) -> tuple[Any, ...]:
        scale = head**-0.5 if self.softmax_scale is None else self.softmax_scale
        first = (self.dropout_p, scale, self.causal, *self.window_size)
        return (*first, self.softcap, self.alibi_slopes)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % _HEAD_MULTIPLE
    return F.pad(tensor, (0, missing)) if missing else tensor


class _Attention(torch.autograd.Function):
    """All variants: what is passed in is unpacked, its gradients come packed alike."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        lengths: _Lengths | None,
        packing: int,
        *packed: torch.Tensor,
    ) -> Any:
        q, k, v = map(_padded, _unpack(packing, lengths is None, packed))
        settings = options.for_kernel(packed[0].shape[-1])
        softmax = options.return_attn_probs and options.dropout_p > 0
        if lengths is None:
            made = _forward(q, k, v, *settings, softmax)
        else:
            where = (lengths.cu_q, lengths.cu_k, lengths.longest_q, lengths.longest_k)
            made = _varlen_forward(q, k, v, *where, *settings, softmax)
        out, lse, probabilities, rng_state = made
        if any(tensor.requires_grad for tensor in packed):
            extra = () if lengths is None else (lengths.cu_q, lengths.cu_k)
            ctx.save_for_backward(q, k, v, out, lse, rng_state, *extra)
        ctx.settings, ctx.packing = (*settings, options.deterministic), packing
        ctx.longest = None if lengths is None else (lengths.longest_q, lengths.longest_k)
        out = out[..., : packed[0].shape[-1]]
        return (out, lse, probabilities) if options.return_attn_probs else out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_unused: Any) -> Any:
        q, k, v, out, lse, rng_state, *cu = ctx.saved_tensors
        packed = _empty_packed(ctx.packing, q, k, v)
        dq, dk, dv = _unpack(ctx.packing, ctx.longest is None, packed)
        tail = (*ctx.settings, rng_state)
        first = (_padded(dout), q, k, v, out, lse, dq, dk, dv)
        if ctx.longest is None:
            _backward(*first, *tail)
        else:
            _varlen_backward(*first, *cu, *ctx.longest, *tail)
        head = dout.shape[-1]
        return (None, None, None, *(tensor[..., :head] for tensor in packed))


def _unpack(packing: int, equal: bool, packed: Any) -> tuple[torch.Tensor, ...]:
    """`packing`: tensors in the last argument; 1, 2 (keys, values) or 3 of them."""
    axis = 2 if equal else 1
    if packing == 1:
        return tuple(packed)
    return (*packed[:-1], *(packed[-1].select(axis, i).detach() for i in range(packing)))


def _empty_packed(
    packing: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    if packing == 1:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    shape = (*k.shape[:-2], packing, *k.shape[-2:])
    together = k.new_empty(shape)
    return (together,) if packing == 3 else (torch.empty_like(q), together)


def _call(packing: int, packed: tuple[torch.Tensor, ...], lengths: Any, options: Any) -> Any:
    return _Attention.apply(  # type: ignore[no-untyped-call]
        options, lengths, packing, *packed
    )


@dataclass(frozen=True)
class _PagedOptions(_Options):
    block_table: torch.Tensor | None = None


def _with(options: type[_Options]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    # Packages look for the names of the options (`inspect.signature`).
    def sign(function: Callable[..., Any]) -> Callable[..., Any]:
        given = inspect.signature(function).parameters.values()
        tensors = [one for one in given if one.kind is one.POSITIONAL_OR_KEYWORD]
        named = inspect.signature(options).parameters.values()
        function.__signature__ = inspect.Signature([*tensors, *named])  # type: ignore[attr-defined]
        return function

    return sign


@_with(_Options)
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any, **named: Any
) -> Any:
    """q, k, v of (batch, sequence, heads, head size)."""
    return _call(1, (q, k, v), None, _Options(*options, **named))


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *options: Any, **named: Any) -> Any:
    """kv of (batch, sequence, 2, heads, head size)."""
    return _call(2, (q, kv), None, _Options(*options, **named))


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *options: Any, **named: Any) -> Any:
    """qkv of (batch, sequence, 3, heads, head size)."""
    return _call(3, (qkv,), None, _Options(*options, **named))


@_with(_PagedOptions)
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Any:
    """q, k, v of (tokens, heads, head size)."""
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _call(1, (q, k, v), lengths, _PagedOptions(*options, **named))


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Any:
    """kv of (tokens, 2, heads, head size)."""
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _call(2, (q, kv), lengths, _Options(*options, **named))


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    """qkv of (tokens, 3, heads, head size)."""
    lengths = _Lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _call(3, (qkv,), lengths, _Options(*options, **named))


_flash_attn_forward = kernels.forward
_flash_attn_backward = kernels.backward
_flash_attn_varlen_forward = kernels.varlen_forward
_flash_attn_varlen_backward = kernels.varlen_backward
