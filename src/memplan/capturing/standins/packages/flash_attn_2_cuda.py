"""Stand-in for the compiled part of flash-attention 2.

Source: flash-attention 2.8.3, `csrc/flash_attn/flash_api.cpp` (`PYBIND11_MODULE`).
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.extension_names import Extension
from memplan.capturing.standins.kernels import flash_attention as kernels
from memplan.capturing.standins.rules import Call

_TAIL = "causal window_size_left window_size_right softcap"
_SAVED = "dout q k v out softmax_lse dq dk dv"
_ARGUMENTS = {
    "fwd": f"q k v out alibi_slopes dropout_p softmax_scale {_TAIL} return_softmax gen",
    "varlen_fwd": "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table "
    f"alibi_slopes max_seqlen_q max_seqlen_k dropout_p softmax_scale zero_tensors {_TAIL} "
    "return_softmax gen",
    "bwd": f"{_SAVED} alibi_slopes dropout_p softmax_scale {_TAIL} deterministic gen rng_state",
    "varlen_bwd": f"{_SAVED} cu_seqlens_q cu_seqlens_k alibi_slopes max_seqlen_q max_seqlen_k "
    f"dropout_p softmax_scale zero_tensors {_TAIL} deterministic gen rng_state",
}


def _forward(call: Call, **given: Any) -> list[torch.Tensor]:
    """Output, log-sum-exp, probabilities where asked for, random state."""
    return list(kernels.forward_memory(call, **given))


def _backward(
    call: Call,
    *,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    **given: Any,
) -> list[torch.Tensor]:
    """Gradients of queries, keys and values, and row sums."""
    pairs = zip("qkv", (dq, dk, dv), strict=True)
    made = [torch.empty_like(given[name]) if out is None else out for name, out in pairs]
    return [*made, kernels.backward_memory(call, **given)]


_rule = Extension("flash_attn_2_cuda", kernels.forward.source)
fwd, varlen_fwd, bwd, varlen_bwd = (
    _rule.named(name, kernels.by_name(names.split(), _backward if "bwd" in name else _forward))
    for name, names in _ARGUMENTS.items()
)
