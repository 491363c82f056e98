"""Mixtures of experts: grouped products, permutation, routing, padding.

Source: Transformer Engine 2.20.2, `pytorch/csrc/extensions/{gemm,permutation,router,padding}.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.operators.assumed import assume_routing_map
from memplan.capturing.standins.extension_names import transformer_engine
from memplan.capturing.standins.launch import record
from memplan.capturing.standins.packages.transformer_engine_torch.enums import (
    TORCH,
    DType,
    NVTERoutingMapFormat,
)
from memplan.capturing.standins.packages.transformer_engine_torch.gemm import product_shape
from memplan.capturing.standins.rules import Call, running

_gemm = transformer_engine("gemm.cpp")
_permutation = transformer_engine("permutation.cpp")
_router = transformer_engine("router.cpp")
_padding = transformer_engine("padding.cpp")
_INT = 4
_BITS = 8
_AUX_CONSTANTS = 2
Tensors = Sequence[torch.Tensor]


def _wrote(name: str, sources: Tensors, targets: Tensors) -> None:
    record(f"transformer_engine.{name}", [*sources, *targets], list(targets))


@_gemm
def te_general_grouped_gemm(
    call: Call,
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: list[torch.Tensor] | None,
    out_dtype: Any,
    m_splits: Any,
    bias: list[torch.Tensor],
    *_more: Any,
    **_named: Any,
) -> list[torch.Tensor]:
    """Writes to the outputs that it is given; the biases, or their gradients, come back."""
    made = out
    if made is None:
        dtype = TORCH[DType(int(out_dtype))]
        made = [
            torch.empty(product_shape(x, transa, y, transb), dtype=dtype, device=x.device)
            for x, y in zip(a, b, strict=True)
        ]
    plain = [item for item in (*a, *b) if isinstance(item, torch.Tensor)]
    _wrote("grouped_gemm", plain, made)
    return bias


@_permutation
def moe_permute_fwd(
    call: Call,
    x: torch.Tensor,
    dtype: Any,
    indices: torch.Tensor,
    num_out_tokens: int,
    workspace: list[torch.Tensor],
    max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Permuted rows, where each went, and what the sort keeps for later calls."""
    rows = indices.shape[0] * indices.shape[1] if indices.dim() > 1 else indices.shape[0]
    device = x.device
    if not workspace:
        numbers = [
            torch.empty(max_expanded_token_num, dtype=torch.int32, device=device) for _ in range(3)
        ]
        # Of a radix sort of pairs: two buffers of keys and values, and counters of CUB's own.
        pairs = 2 * max_expanded_token_num * _INT
        workspace = [*numbers, call.workspace(pairs, low=0, high=pairs + pairs // 4 + (1 << 20))]
    out = torch.empty(num_out_tokens or rows, x.shape[1], dtype=x.dtype, device=device)
    row_id_map = torch.empty(x.shape[0] * indices.shape[1], dtype=torch.int32, device=device)
    return out, row_id_map, workspace


def _unpermuted(
    call: Call,
    x: torch.Tensor,
    dtype: Any,
    row_id_map: torch.Tensor,
    prob: torch.Tensor,
    num_tokens: int,
    top_k: int,
) -> torch.Tensor:
    return torch.empty(num_tokens, x.shape[1], dtype=x.dtype, device=x.device)


moe_unpermute_fwd = _permutation.named("moe_unpermute_fwd", _unpermuted)
moe_permute_bwd = _permutation.named("moe_permute_bwd", _unpermuted)


@_permutation
def moe_unpermute_bwd(
    call: Call,
    grad: torch.Tensor,
    x: torch.Tensor,
    dtype: Any,
    row_id_map: torch.Tensor,
    prob: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows and probabilities."""
    rows, top_k = (prob.shape[0], prob.shape[1]) if prob.numel() else (row_id_map.shape[0], 1)
    act = torch.empty(x.shape[0], grad.shape[1], dtype=grad.dtype, device=grad.device)
    return act, torch.empty(rows, top_k, dtype=torch.float32, device=grad.device)


def _map(logits: torch.Tensor, form: Any, top_k: int) -> torch.Tensor:
    *leading, experts = logits.shape
    if int(form) == NVTERoutingMapFormat.BITMAP_U8:
        return torch.empty(*leading, -(-experts // _BITS), dtype=torch.uint8, device=logits.device)
    chosen = torch.empty(*leading, experts, dtype=torch.bool, device=logits.device)
    state = running()
    if state is not None and isinstance(chosen, FakeTensor):
        assume_routing_map(state, state.acting, chosen, top_k)
    return chosen


@_router
def fused_topk_with_score_function_fwd(
    call: Call,
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: Any = 0,
    topk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Probabilities, routing map, scores in fp32."""
    probs = torch.empty_like(logits)
    routing = _map(logits, routing_map_format, topk) if topk_indices is None else topk_indices
    return probs, routing, torch.empty_like(logits, dtype=torch.float32)


@_router
def fused_score_for_moe_aux_loss_fwd(
    call: Call, logits: torch.Tensor, topk: int, score_function: str, routing_map_format: Any = 0
) -> tuple[torch.Tensor, ...]:
    """Scores, routing map, and what the backward pass needs."""
    scores = torch.empty_like(logits, dtype=torch.float32)
    return scores, _map(logits, routing_map_format, topk), torch.empty_like(scores)


def _router_backward(given: int) -> Callable[..., Any]:
    """A backward function with so many given tensors. The gradient of the logits comes after them;
    older versions create it."""

    def backward(call: Call, *args: Any, **named: Any) -> Any:
        tensors = [item for item in (*args, *named.values()) if isinstance(item, torch.Tensor)]
        if len(tensors) > given:
            _wrote("router_bwd", tensors[:given], tensors[given : given + 1])
            return None
        return torch.empty_like(tensors[given - 1])

    return backward


fused_topk_with_score_function_bwd = _router.named(
    "fused_topk_with_score_function_bwd", _router_backward(3)
)
fused_score_for_moe_aux_loss_bwd = _router.named(
    "fused_score_for_moe_aux_loss_bwd", _router_backward(2)
)


@_router
def fused_moe_aux_loss_fwd(
    call: Call, probs: torch.Tensor, tokens_per_expert: torch.Tensor, *_more: Any, **_named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and its constant."""
    loss = torch.empty((), dtype=probs.dtype, device=probs.device)
    return loss, torch.empty(_AUX_CONSTANTS, dtype=torch.float32, device=probs.device)


@_router
def fused_moe_aux_loss_bwd(
    call: Call,
    const_buf: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the probabilities."""
    return torch.empty(num_rows, num_cols, dtype=grad_aux_loss.dtype, device=grad_aux_loss.device)


def _padded(call: Call, x: torch.Tensor, out: torch.Tensor, *_rows: Any) -> None:
    _wrote("padding", [x], [out])


fused_multi_row_padding = _padding.named("fused_multi_row_padding", _padded)
fused_multi_row_unpadding = _padding.named("fused_multi_row_unpadding", _padded)
