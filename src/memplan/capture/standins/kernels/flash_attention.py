"""The kernels of `flash_attn`: what they return, and what they take while they run.

Source: flash-attention 2.8.3, `csrc/flash_attn/flash_api.cpp` (`mha_fwd`, `mha_varlen_fwd`,
`mha_bwd`, `mha_varlen_bwd`); sizes are exact. Tensors are (batch, sequence, heads, head size), of
variable length (tokens, heads, head size).
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capture.kernels.attention_scratch import flash_splits
from memplan.capture.kernels.model import ceil_div, round_up
from memplan.capture.standins.rules import Call, Rule

_SOURCE = "flash-attention 2.8.3, csrc/flash_attn/flash_api.cpp"
_FLOAT = 4
_BLOCK = 128


def _head(size: int) -> int:
    return round_up(size, 32 if size <= 128 else 64)


def _sm_count() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def _nsplits(deterministic: bool, batch: int, heads: int) -> int:
    return ceil_div(_sm_count(), batch * heads) if deterministic else 1


def _float(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _forward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp, probabilities where asked for, random state."""
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    batch, queries, heads, head = q.shape
    keys = k.shape[1]
    out = torch.empty_like(q)
    lse = _float(q, batch, heads, queries)
    rounded = (batch, heads, round_up(queries, _BLOCK), round_up(keys, _BLOCK))
    p = q.new_empty(rounded if return_softmax else (0,))
    if dropout_p == 0.0:
        splits = flash_splits((batch, heads, queries, head), keys, _sm_count())
        if splits > 1:
            rows = splits * batch * heads * queries
            call.workspace(rows * _FLOAT)
            call.workspace(rows * _head(head) * _FLOAT)
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
    return out, lse, p, rng_state


def _varlen_forward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    *_more: Any,
    **_named: Any,
) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp, probabilities where asked for, random state."""
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    total, heads, _ = q.shape
    batch = cu_seqlens_q.numel() - 1
    out = torch.empty_like(q)
    lse = _float(q, heads, total)
    rounded = (batch, heads, round_up(max_seqlen_q, _BLOCK), round_up(max_seqlen_k, _BLOCK))
    p = q.new_empty(rounded if return_softmax else (0,))
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
    return out, lse, p, rng_state


def _backward(
    call: Call,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row sums; the gradients are written to `dq`, `dk`, `dv`."""
    copies = [t if t.stride(-1) == 1 else t.contiguous() for t in (dout, q, k, v, out)]
    batch, queries, heads, head = q.shape
    rounded = round_up(queries, _BLOCK)
    softmax_d = _float(q, batch, heads, rounded)
    splits = _nsplits(deterministic, batch, heads)
    call.workspace(splits * batch * rounded * heads * _head(head) * _FLOAT)
    _expanded(call, k, heads)
    del copies
    return softmax_d


def _varlen_backward(
    call: Call,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Row sums; the gradients are written to `dq`, `dk`, `dv`."""
    copies = [t if t.stride(-1) == 1 else t.contiguous() for t in (dout, q, k, v, out)]
    total, heads, head = q.shape
    batch = cu_seqlens_q.numel() - 1
    padded = total + _BLOCK * batch
    softmax_d = _float(q, heads, padded)
    splits = _nsplits(deterministic, batch, heads)
    call.workspace(splits * padded * heads * _head(head) * _FLOAT)
    _expanded(call, k, heads)
    del copies
    return softmax_d


def _expanded(call: Call, k: torch.Tensor, heads: int) -> None:
    """Gradients of keys and values for every query head, before the heads of a group are added."""
    if k.shape[-2] != heads:
        size = k.numel() // k.shape[-2] * heads * k.element_size()
        call.workspace(size)
        call.workspace(size)


forward = Rule("flash_attn::_flash_attn_forward", _forward, _SOURCE)
varlen_forward = Rule("flash_attn::_flash_attn_varlen_forward", _varlen_forward, _SOURCE)
backward = Rule("flash_attn::_flash_attn_backward", _backward, _SOURCE)
varlen_backward = Rule("flash_attn::_flash_attn_varlen_backward", _varlen_backward, _SOURCE)

_TAIL = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes"
)
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_SAVED = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv"
)
_OUT = "(Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = {
    forward: f"(Tensor q, Tensor k, Tensor v, {_TAIL}, bool return_softmax) -> {_OUT}",
    varlen_forward: f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_TAIL}, bool return_softmax) "
    f"-> {_OUT}",
    backward: f"({_SAVED}, {_TAIL}, bool deterministic, Tensor? rng_state) -> Tensor",
    varlen_backward: f"({_SAVED}, {_LENGTHS}, {_TAIL}, bool deterministic, Tensor? rng_state) "
    "-> Tensor",
}
"""As the package registers them: compilers see operators, not what is in them."""

RULES = (forward, varlen_forward, backward, varlen_backward)
