"""The kernels of `flash_attn`: what they return, and what they take while they run.

Source: flash-attention 2.8.3, `csrc/flash_attn/flash_api.cpp` (`mha_fwd`, `mha_varlen_fwd`,
`mha_bwd`, `mha_varlen_bwd`); sizes are exact. Tensors are (batch, sequence, heads, head size), of
variable length (tokens, heads, head size).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memplan.capturing.kernels.attention_scratch import flash_splits
from memplan.capturing.kernels.model import ceil_div, round_up
from memplan.capturing.standins.rules import Call, Rule

_SOURCE = "flash-attention 2.8.3, csrc/flash_attn/flash_api.cpp"
_FLOAT = 4
_BLOCK = 128


def by_name(names: Sequence[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule whose arguments have these names, from a function that takes them by name: the same
    kernel is called in several orders."""

    def rule(call: Call, *args: Any, **kwargs: Any) -> Any:
        return function(call, **dict(zip(names, args, strict=False)), **kwargs)

    return rule


def names_of(schema: str) -> list[str]:
    """The arguments of an operator's schema."""
    arguments = schema[: schema.index("->")]
    return re.findall(r"(\w+)(?:=[^,)]*)?(?=[,)])", re.sub(r"\(\w+!\)", "", arguments))


def rows_copied(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Kernels want the last dimension contiguous."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def empty_float(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """A tensor in fp32, as statistics and accumulators are."""
    return like.new_empty(shape, dtype=torch.float32)


def sm_count() -> int:
    """The number of multiprocessors of the chosen card."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def _head(size: int) -> int:
    return round_up(size, 32 if size <= 128 else 64)


def forward_memory(
    call: Call,
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float,
    return_softmax: bool = False,
    **_more: Any,
) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp, probabilities where asked for, random state."""
    q, k, v = rows_copied(q, k, v)
    heads, head = q.shape[-2:]
    out = torch.empty_like(q)
    if cu_seqlens_q is None:
        batch, max_seqlen_q, max_seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        lse = empty_float(q, batch, heads, max_seqlen_q)
    else:
        batch = cu_seqlens_q.numel() - 1
        lse = empty_float(q, heads, q.shape[0])
    rounded = (batch, heads, round_up(max_seqlen_q, _BLOCK), round_up(max_seqlen_k, _BLOCK))
    p = q.new_empty(rounded if return_softmax else (0,))
    if dropout_p == 0.0 and cu_seqlens_q is None:
        splits = flash_splits((batch, heads, max_seqlen_q, head), max_seqlen_k, sm_count())
        if splits > 1:
            rows = splits * batch * heads * max_seqlen_q
            call.workspace(rows * _FLOAT)
            call.workspace(rows * _head(head) * _FLOAT)
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
    return out, lse, p, rng_state


def backward_memory(
    call: Call,
    *,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    deterministic: bool,
    **_more: Any,
) -> torch.Tensor:
    """Row sums; the gradients are written to `dq`, `dk`, `dv`."""
    copies = rows_copied(dout, q, k, v, out)
    heads, head = q.shape[-2:]
    if cu_seqlens_q is None:
        batch, rounded = q.shape[0], round_up(q.shape[1], _BLOCK)
        softmax_d = empty_float(q, batch, heads, rounded)
    else:
        batch = cu_seqlens_q.numel() - 1
        softmax_d = empty_float(q, heads, q.shape[0] + _BLOCK * batch)
    splits = ceil_div(sm_count(), batch * heads) if deterministic else 1
    call.workspace(splits * softmax_d.numel() * _head(head) * _FLOAT)
    if k.shape[-2] != heads:
        # Gradients of keys and values for every query head, before those of a group are added.
        size = k.numel() // k.shape[-2] * heads * k.element_size()
        call.workspace(size)
        call.workspace(size)
    del copies
    return softmax_d


_TAIL = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes"
)
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_SAVED = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv"
)
_MADE = "bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
_SCHEMAS = {
    "_flash_attn_forward": f"(Tensor q, Tensor k, Tensor v, {_TAIL}, {_MADE}",
    "_flash_attn_varlen_forward": f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_TAIL}, {_MADE}",
    "_flash_attn_backward": f"({_SAVED}, {_TAIL}, bool deterministic, Tensor? rng_state) -> Tensor",
    "_flash_attn_varlen_backward": f"({_SAVED}, {_LENGTHS}, {_TAIL}, bool deterministic, "
    "Tensor? rng_state) -> Tensor",
}


def _rule(name: str, schema: str) -> Rule:
    function = backward_memory if name.endswith("backward") else forward_memory
    return Rule(f"flash_attn::{name}", by_name(names_of(schema), function), _SOURCE)


SCHEMAS = {_rule(name, schema): schema for name, schema in _SCHEMAS.items()}
"""Schemas as the package registers them: compilers see these operators, not what is in them."""
forward, varlen_forward, backward, varlen_backward = RULES = tuple(SCHEMAS)
