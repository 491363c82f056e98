"""Memory that the attention kernels take beside their inputs and outputs.

Shapes are (batch, heads, sequence, head size), the head size after padding to a multiple of 8.
Sources: pytorch `native/transformers/cuda/{attention.cu,attention_backward.cu}`,
`flash_attn/flash_api.cpp`, `mem_eff_attention/{kernel_forward.h,kernel_backward.h,kernels/*.h}`,
`native/cudnn/MHA.cpp`; cudnn-frontend's `scaled_dot_product_flash_attention.h`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.capturing.kernels.model import (
    HALF,
    Scratch,
    Shape,
    ceil_div,
    exactly,
    itemsize,
    numel,
    round_up,
)

_FLOAT = 4
_CUDNN_ALIGNMENT = 256


def flash_forward_scratch(q: Shape, k: Shape, *, dropout_p: float, sm_count: int) -> list[Scratch]:
    """Split-KV accumulators of `mha_fwd`; the state of the random numbers where there is dropout.
    Its two random-state tensors (16 and 8 bytes) live with the outputs and are not counted."""
    if dropout_p != 0.0:
        return [exactly("random numbers' state", 16)]
    batch, heads, queries, head = q
    splits = flash_splits(q, k[-2], sm_count)
    if splits == 1:
        return []
    size = splits * batch * heads * queries * _FLOAT
    return [exactly("softmax_lse_accum", size), exactly("out_accum", size * _flash_head(head))]


def flash_splits(q: Shape, keys: int, sm_count: int) -> int:
    """Number of key splits that `num_splits_heuristic` takes for (batch, heads, query, size)."""
    batch, heads, queries, head = q
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    key_blocks = ceil_div(keys, block)
    work = batch * heads * ceil_div(queries, 64)
    processors = 2 * sm_count
    if work >= 0.8 * processors:
        return 1
    most = min(128, processors, key_blocks)
    efficiency = {}
    for splits in range(1, most + 1):
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):
            waves = work * splits / processors
            efficiency[splits] = waves / -(-work * splits // processors)
    best = max(efficiency.values())
    return next(splits for splits, value in efficiency.items() if value >= 0.85 * best)


def _flash_head(head: int) -> int:
    return round_up(head, 32) if head <= 192 else 256


def flash_backward_scratch(
    q: Shape,
    k: Shape,
    dtype: str,
    *,
    deterministic: bool = False,
    sm_count: int = 1,
    grad_out_copied: bool = False,
    sequences: int = 0,
) -> list[Scratch]:
    """`mha_bwd`: row sums and fp32 accumulators of dQ; full-headed dK, dV for grouped queries.

    `sequences`: `mha_varlen_bwd` with so many sequences, whose rows are one after the other.

    `grad_out_copied`: the incoming gradient is not contiguous as (batch, sequence, heads, size),
    so that `_flash_attention_backward` copies it first.
    """
    batch, heads, queries, head = q
    rounded = queries + 128 * sequences if sequences else round_up(queries, 128)
    splits = ceil_div(sm_count, (sequences or batch) * heads) if deterministic else 1
    out = [
        exactly("grad_out.contiguous", numel(q) * itemsize(dtype) if grad_out_copied else 0),
        exactly("softmax_d", batch * heads * rounded * _FLOAT),
        exactly("dq_accum", splits * batch * rounded * heads * _flash_head(head) * _FLOAT),
    ]
    if k[1] != heads:
        expanded = batch * k[-2] * heads * head * itemsize(dtype)
        out += [exactly("dk_expanded", expanded), exactly("dv_expanded", expanded)]
    return [row for row in out if row.high]


def efficient_forward_scratch(q: Shape, v: Shape, dtype: str) -> list[Scratch]:
    """fp32 output accumulator of the kernels for head sizes above 128 in half precision."""
    batch, heads, queries, head = q
    if dtype in HALF and max(head, v[-1]) > 128:
        return [exactly("output_accum", batch * queries * heads * v[-1] * _FLOAT)]
    return []


@dataclass(frozen=True)
class _Tile:
    """A backward kernel of `kernels/cutlassB.h`: tile rows and columns, largest head size."""

    rows: int
    columns: int
    largest: int


def _tiles(dtype: str, head: int, capability: tuple[int, int]) -> list[_Tile]:
    """Kernels that may be taken, the likeliest first. Which one fits depends on the chip's shared
    memory: 163 KiB and more on 8.0, 9.0, 10.x; 99 KiB on 8.6, 8.9 and 12.x."""
    if head <= 64:
        return [_Tile(64, 64, 32 if head <= 32 else 64)]
    large_smem = capability in ((8, 0), (8, 7)) or capability[0] in (9, 10, 11)
    small, wide = _Tile(64, 64, 128), _Tile(128, 64, 65536)
    if dtype not in HALF:
        if capability < (8, 0):
            return [_Tile(64, 64, 65536)]
        return [_Tile(128, 64, 65536), _Tile(64, 64, 65536)]
    if head > 128:
        return [wide, _Tile(64, 64, 65536)]
    if capability < (8, 0):
        return [_Tile(128, 64, 128), small]
    if capability in ((8, 6), (8, 9)) and head <= 96:
        return [_Tile(128, 64, 96), small]
    return [_Tile(128, 128, 128), small] if large_smem else [small, _Tile(128, 128, 128)]


def efficient_backward_scratch(
    q: Shape,
    k: Shape,
    v: Shape,
    dtype: str,
    capability: tuple[int, int],
    *,
    deterministic: bool = False,
    lengths: tuple[int, int, int] | None = None,
) -> list[Scratch]:
    """`_efficient_attention_backward`: `delta`, and the gradient workspace of the kernel.

    `lengths`: where the rows of several sequences are one after the other, how many sequences, and
    the longest query and key.

    Half precision computes delta in the kernel; float32 makes grad_out * out first (three
    temporaries alive at once), of which only delta remains.
    """
    batch, heads, queries, head = q
    delta = batch * heads * queries * _FLOAT
    out: list[Scratch] = []
    if dtype in HALF:
        out.append(exactly("delta", delta, end=2))
    else:
        out.append(exactly("grad_out*out", batch * queries * heads * v[-1] * _FLOAT))
        out.append(exactly("sum", delta))
        out.append(exactly("delta", delta, end=2))
    sequences, longest, keys = lengths or (batch, queries, k[-2])
    each = (sequences, heads, longest, head)
    sizes = [
        _efficient_workspace(tile, each, keys, v[-1], dtype, capability, deterministic)
        for tile in _tiles(dtype, max(head, v[-1]), capability)
    ]
    out.append(Scratch("workspace", min(sizes), sizes[0], max(sizes), begin=1, end=2))
    return [row for row in out if row.high]


def _efficient_workspace(
    tile: _Tile,
    q: Shape,
    keys: int,
    head_v: int,
    dtype: str,
    capability: tuple[int, int],
    deterministic: bool,
) -> int:
    """`Params::workspace_size()` of `kernel_backward.h`, in bytes."""
    batch, heads, queries, head = q
    if capability < (7, 0) and dtype not in HALF:
        return 0  # no split keys, and the gradient is its own accumulator
    tiles = ceil_div(queries, tile.rows) * ceil_div(head, tile.columns)
    elements = tiles * (tile.rows * tile.columns + 4)
    if dtype in HALF and tile.largest > tile.rows:
        splits = _key_splits(tile, batch * heads, keys, deterministic)
        for size in (head, head_v):
            elements += splits * tile.columns * round_up(size, tile.rows)
    return batch * heads * round_up(elements, 4) * _FLOAT


def _key_splits(tile: _Tile, blocks: int, keys: int, deterministic: bool) -> int:
    splits = ceil_div(keys, tile.columns)
    if blocks >= 256 and keys <= 2 * tile.columns:
        splits = 1
    return 1 if deterministic else max(1, min(splits, 200 // blocks))


def cudnn_forward_scratch(q: Shape) -> list[Scratch]:
    """The forward graph asks for next to nothing: 256 bytes on an H200 with cuDNN 9.19."""
    most = _CUDNN_ALIGNMENT + q[0] * q[1] * q[2] * _FLOAT
    return [Scratch("workspace", 0, _CUDNN_ALIGNMENT, most)]


def cudnn_backward_scratch(q: Shape, k: Shape, v: Shape, dtype: str) -> list[Scratch]:
    """The backward graph's workspace, as cudnn-frontend builds it: row sums, an fp32 dQ
    accumulator, and full-headed dK and dV for grouped queries, to the byte on an H200 with cuDNN
    9.19. Other releases may round or add to it."""
    batch, heads, queries, head = q
    sums = batch * heads * queries * _FLOAT
    expected = sums + sums * head + _CUDNN_ALIGNMENT
    if k[1] != heads or v[1] != heads:
        expected += batch * heads * k[-2] * (head + v[-1]) * itemsize(dtype)
    return [Scratch("workspace", sums, expected, expected + expected // 4 + (1 << 20))]
