"""The kernels of `flash_attn_3`: what they return, and what they take while they run.

Source: flash-attention, `hopper/flash_api.cpp` (`mha_fwd`, `get_num_splits`, `mha_bwd`),
`heuristics.h`, `tile_size.h`; sizes are exact on compute capability 9.0, elsewhere but for the
number of key splits. Tensors are (batch, sequence, heads, head size), of variable length (tokens,
heads, head size); the head size of values may differ.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.kernels.model import ceil_div, round_up
from memplan.capturing.standins.kernels.flash_attention import (
    by_name,
    empty_float,
    names_of,
    rows_copied,
    sm_count,
)
from memplan.capturing.standins.rules import Call, Rule

_SOURCE = "flash-attention 3, hopper/flash_api.cpp"
_INT = 4
_L2_BYTES = 50 << 20
_MOST_SPLITS = 128
_HEADS = (64, 96, 128, 192, 256)


def _window(
    queries: int, keys: int, causal: bool, left: int, right: int
) -> tuple[bool, bool, int, int]:
    """Whether attention is causal, whether it is local, and the window, as the kernels see it."""
    left = -1 if left >= keys - 1 else left
    right = 0 if causal else -1 if right >= queries - 1 else right
    causal = left < 0 and right == 0
    return causal, (left >= 0 or right >= 0) and not causal, left, right


def _forward_tile(head: int, head_v: int, causal: bool, local: bool) -> tuple[int, int]:
    """Rows of queries and of keys that a block works on, in half precision."""
    if head <= 64:
        wide = {512: (64, 64), 256: (128, 112)}
        return wide.get(head_v, (192, 128 if causal else 160 if local else 192))
    if head <= 96:
        return 192, 128 if local else 144
    if head <= 128:
        return 128, 128 if causal or local else 176
    if head <= 192:
        return 128, 96 if local else 128 if head_v <= 128 else 112
    return 128, 64 if local else 80


def _splits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, int, int],
    window: tuple[bool, bool, int, int],
    sm_margin: int,
) -> int:
    """Parts that the keys are split into where the caller leaves that to the kernel."""
    batch, queries, keys = lengths
    causal, local, left, right = window
    rows, columns = _forward_tile(q.shape[-1], v.shape[-1], causal, local)
    loaded = max(0, min(keys, right + left + 1 + rows)) if local else keys
    row_blocks = ceil_div(queries * (q.shape[-2] // k.shape[-2]), rows)
    key_blocks = ceil_div(loaded, columns)
    processors = sm_count() - sm_margin
    work = batch * k.shape[-2] * row_blocks
    if work >= 0.8 * processors:
        one_head = keys * (q.shape[-1] + v.shape[-1]) * q.element_size()
        again = one_head > _L2_BYTES and row_blocks >= 2 * processors and not (causal or local)
        return min(ceil_div(one_head, _L2_BYTES), _MOST_SPLITS) if again else 1
    if key_blocks <= 4:
        return 1
    waves = [work * n / processors for n in range(1, min(_MOST_SPLITS, processors, key_blocks) + 1)]
    efficiency = [wave / -(-wave // 1) for wave in waves]
    best = max(efficiency)
    return next(n for n, value in enumerate(efficiency, 1) if value >= 0.85 * best)


def forward_memory(
    call: Call,
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    num_splits: int = 1,
    sm_margin: int = 0,
    **_more: Any,
) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp, and both of each split of the keys where there are several."""
    q, k, v = rows_copied(q, k, v)
    varlen = any(item is not None for item in (cu_seqlens_q, seqused_q, seqused_k))
    keys = k.shape[1] if page_table is None else k.shape[1] * page_table.shape[1]
    if cu_seqlens_q is None:
        batch, queries = q.shape[:2]
        rows: tuple[int, ...] = (batch, q.shape[2], queries)
    else:
        batch, queries = cu_seqlens_q.numel() - 1, max_seqlen_q or 0
        rows = (q.shape[1], q.shape[0])
        keys = keys if page_table is not None else max_seqlen_k or 0
    if out is None:
        half = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=half)
    lse = empty_float(q, *rows)
    window = _window(queries, keys, causal, window_size_left, window_size_right)
    if num_splits <= 0:
        # Of variable length the number is decided on the device: at most as for one sequence.
        lengths = (1 if varlen else batch, queries, keys)
        num_splits = _splits(q, k, v, lengths, window, sm_margin)
    if varlen or (any(window[:2]) and num_splits == 1):
        call.workspace(_INT * (1 + 4 * round_up(batch, 4)))  # the scheduler's counts
    if num_splits <= 1:
        return out, lse, empty_float(q, 0), empty_float(q, 0)
    accumulated = empty_float(q, num_splits, *rows, v.shape[-1])
    return out, lse, accumulated, empty_float(q, num_splits, *rows)


def _backward_tile(head: int, causal: bool, local: bool, softcap: float) -> tuple[int, int]:
    """Rows of queries and of keys that a block works on."""
    major, minor = torch.cuda.get_device_capability()
    if major >= 9:
        columns = 128 if head <= 128 else 96 if head <= 192 else 80
        if head <= 64:
            return 96 if causal and softcap > 0 else 128, columns
        return 80 if 96 < head <= 128 and not (causal or local or softcap > 0) else 64, columns
    if minor in (6, 9):
        return 64 if head <= 192 else 32, 128 if head <= 96 else 96 if head <= 128 else 64
    return 128 if head <= 64 else 64, 128 if head <= 128 else 80 if head <= 192 else 64


def backward_memory(
    call: Call,
    *,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    **_more: Any,
) -> tuple[torch.Tensor, ...]:
    """Row sums, log-sum-exp in base 2, accumulators in fp32; gradients go to `dq`, `dk`, `dv`."""
    copies = rows_copied(dout, q, k, v, out)
    heads, groups = q.shape[-2], k.shape[-2]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    queries = q.shape[1] if cu_seqlens_q is None else max_seqlen_q or 0
    keys = k.shape[1] if cu_seqlens_k is None else max_seqlen_k or 0
    causal, local, _, _ = _window(queries, keys, is_causal, window_size_left, window_size_right)
    head = next(size for size in _HEADS if size >= max(q.shape[-1], v.shape[-1]))
    rows, columns = _backward_tile(head, causal, local, softcap)
    given = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if all(item is None for item in given):
        of_queries = batch * round_up(queries, rows)
        of_keys = batch * round_up(keys, columns)
    else:
        tokens = q.shape[0] if cu_seqlens_q is not None else batch * queries
        of_queries = round_up(tokens + batch * rows, rows)
        tokens = k.shape[0] if cu_seqlens_k is not None else batch * keys
        of_keys = round_up(tokens + batch * columns, columns)
    sums, lse = (empty_float(q, heads, of_queries) for _ in range(2))
    dq = empty_float(q, heads, of_queries * head)
    grouped = groups != heads
    dk, dv = (empty_float(q, groups if grouped else 0, of_keys * head) for _ in range(2))
    call.workspace(ceil_div(queries, rows) * batch * heads * _INT)  # semaphores
    if grouped and deterministic:
        for _ in range(2):
            call.workspace(ceil_div(keys, columns) * batch * groups * _INT)
    del copies
    return sums, lse, dq, dk, dv


_SEQUENCES = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, {new}Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None"
)
_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, "
    f"Tensor? out=None, {_SEQUENCES.format(new='Tensor? cu_seqlens_k_new=None, ')}, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, SymInt attention_chunk=0, float softcap=0.0, "
    "bool rotary_interleaved=False, Tensor? scheduler_metadata=None, SymInt num_splits=1, "
    "bool? pack_gqa=None, SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a6!)? dq=None, Tensor(a7!)? dk=None, Tensor(a8!)? dv=None, "
    f"{_SEQUENCES.format(new='')}, float? softmax_scale=None, bool is_causal=False, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, "
    "bool deterministic=False, SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
forward = Rule("flash_attn_3::fwd", by_name(names_of(_FORWARD), forward_memory), _SOURCE)
backward = Rule("flash_attn_3::bwd", by_name(names_of(_BACKWARD), backward_memory), _SOURCE)
SCHEMAS = {forward: _FORWARD, backward: _BACKWARD}
"""Schemas as the compiled part of the package registers them."""
