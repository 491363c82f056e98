"""Stand-in for the compiled part of flash-attention 2.

Source: flash-attention 2.8.3, `csrc/flash_attn/flash_api.cpp` (`PYBIND11_MODULE`).
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capture.standins.extension_names import Extension
from memplan.capture.standins.kernels import flash_attention as kernels
from memplan.capture.standins.rules import Call

_rule = Extension("flash_attn_2_cuda", kernels.forward.source)


def _gradients(like: tuple[torch.Tensor, ...], given: tuple[Any, ...]) -> list[torch.Tensor]:
    pairs = zip(like, given, strict=True)
    return [torch.empty_like(tensor) if out is None else out for tensor, out in pairs]


@_rule
def fwd(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any = None,
) -> list[torch.Tensor]:
    """Output, log-sum-exp, probabilities where asked for, random state."""
    del out, gen
    settings = (p_dropout, softmax_scale, is_causal, left, right, softcap, alibi_slopes)
    return list(kernels.forward.function(call, q, k, v, *settings, return_softmax))


@_rule
def varlen_fwd(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    seqused_k: Any,
    leftpad_k: Any,
    block_table: Any,
    alibi_slopes: torch.Tensor | None,
    longest_q: int,
    longest_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any = None,
) -> list[torch.Tensor]:
    """As `fwd`, for sequences of variable length."""
    del out, gen, seqused_k, leftpad_k, block_table, zero_tensors
    settings = (p_dropout, softmax_scale, is_causal, left, right, softcap, alibi_slopes)
    lengths = (cu_q, cu_k, longest_q, longest_k)
    return list(kernels.varlen_forward.function(call, q, k, v, *lengths, *settings, return_softmax))


@_rule
def bwd(
    call: Call,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    gen: Any = None,
    rng_state: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients of queries, keys and values, and row sums."""
    del gen
    made = _gradients((q, k, v), (dq, dk, dv))
    settings = (p_dropout, softmax_scale, is_causal, left, right, softcap, alibi_slopes)
    tensors = (dout, q, k, v, out, lse, *made)
    sums = kernels.backward.function(call, *tensors, *settings, deterministic, rng_state)
    return [*made, sums]


@_rule
def varlen_bwd(
    call: Call,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    longest_q: int,
    longest_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    gen: Any = None,
    rng_state: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """As `bwd`, for sequences of variable length."""
    del gen
    made = _gradients((q, k, v), (dq, dk, dv))
    settings = (p_dropout, softmax_scale, is_causal, left, right, softcap, alibi_slopes)
    tensors = (dout, q, k, v, out, lse, *made, cu_q, cu_k, longest_q, longest_k)
    sums = kernels.varlen_backward.function(
        call, *tensors, *settings, deterministic, rng_state, zero_tensors
    )
    return [*made, sums]
