"""Scratch of the attention kernels, against their sources' formulas and the meta kernels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.capturing.kernels import attention_scratch as scratch
from memplan.capturing.kernels.model import Scratch
from tests.capturing.kernels.stages import peak

A100, A10, T4, H100 = (8, 0), (8, 6), (7, 5), (9, 0)


def by_name(rows: list[Scratch]) -> dict[str, Scratch]:
    return {row.name: row for row in rows}


def test_flash_backward_of_gpt2() -> None:
    q = (4, 12, 1024, 64)
    rows = by_name(scratch.flash_backward_scratch(q, q, "bfloat16"))
    assert rows["softmax_d"].bytes == 4 * 12 * 1024 * 4
    assert rows["dq_accum"].bytes == 4 * 12 * 1024 * 64 * 4
    assert set(rows) == {"softmax_d", "dq_accum"}
    assert all(row.low == row.high for row in rows.values())


def test_flash_backward_rounds_lengths_and_head_sizes() -> None:
    q = (1, 2, 100, 72)
    rows = by_name(scratch.flash_backward_scratch(q, q, "float16"))
    assert rows["softmax_d"].bytes == 2 * 128 * 4
    assert rows["dq_accum"].bytes == 128 * 2 * 96 * 4


def test_flash_backward_of_grouped_queries_expands_keys_and_values() -> None:
    rows = by_name(scratch.flash_backward_scratch((2, 32, 512, 128), (2, 8, 512, 128), "bfloat16"))
    assert rows["dk_expanded"].bytes == rows["dv_expanded"].bytes == 2 * 512 * 32 * 128 * 2


def test_flash_forward_splits_keys_only_when_the_gpu_would_idle() -> None:
    assert scratch.flash_splits((4, 12, 1024, 64), 1024, sm_count=108) == 1
    assert scratch.flash_splits((1, 8, 1, 128), 8192, sm_count=108) > 1
    q = (4, 12, 1024, 64)
    assert scratch.flash_forward_scratch(q, q, dropout_p=0.0, sm_count=108) == []
    one, keys = (1, 8, 1, 128), (1, 8, 8192, 128)
    rows = by_name(scratch.flash_forward_scratch(one, keys, dropout_p=0.0, sm_count=108))
    splits = scratch.flash_splits(one, 8192, 108)
    assert rows["out_accum"].bytes == splits * 8 * 128 * 4
    dropped = scratch.flash_forward_scratch(one, keys, dropout_p=0.1, sm_count=108)
    assert "out_accum" not in by_name(dropped)


def test_efficient_backward_in_float32_makes_a_product_first() -> None:
    q = (2, 12, 128, 64)
    rows = by_name(scratch.efficient_backward_scratch(q, q, q, "float32", A10))
    assert rows["grad_out*out"].bytes == 2 * 12 * 128 * 64 * 4
    assert rows["delta"].bytes == 2 * 12 * 128 * 4
    assert rows["grad_out*out"].end == rows["workspace"].begin
    # 2 x 1 tiles of 64 x 64 floats and a header of 4 words
    assert rows["workspace"].bytes == 2 * 12 * 2 * (64 * 64 + 4) * 4


def test_efficient_backward_in_half_precision_keeps_delta_in_the_kernel() -> None:
    q = (2, 12, 128, 64)
    rows = by_name(scratch.efficient_backward_scratch(q, q, q, "bfloat16", A100))
    assert set(rows) == {"delta", "workspace"}
    assert rows["workspace"].low == rows["workspace"].high


def test_efficient_backward_above_the_tile_accumulates_keys_and_values_too() -> None:
    q = (1, 2, 256, 256)
    wide = by_name(scratch.efficient_backward_scratch(q, q, q, "float16", A100))["workspace"]
    gradient_q_only = 2 * 2 * 4 * (128 * 64 + 4) * 4
    assert wide.bytes == gradient_q_only + 2 * 4 * 2 * 64 * 256 * 4
    split_once = by_name(
        scratch.efficient_backward_scratch(q, q, q, "float16", A100, deterministic=True)
    )["workspace"]
    assert split_once.bytes == gradient_q_only + 2 * 2 * 64 * 256 * 4


def test_efficient_forward_accumulates_wide_heads_in_float() -> None:
    assert scratch.efficient_forward_scratch((1, 2, 8, 128), (1, 2, 8, 128), "float16") == []
    assert scratch.efficient_forward_scratch((1, 2, 8, 256), (1, 2, 8, 256), "float32") == []
    (row,) = scratch.efficient_forward_scratch((1, 2, 8, 256), (1, 2, 8, 256), "float16")
    assert row.bytes == 2 * 8 * 256 * 4


sizes = st.tuples(st.integers(1, 4), st.integers(1, 16), st.integers(1, 600), st.integers(1, 32))


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(["float16", "bfloat16", "float32"]), st.sampled_from([A100, A10, T4]))
def test_scratch_is_ordered_and_grows_with_the_batch(
    size: tuple[int, int, int, int], dtype: str, capability: tuple[int, int]
) -> None:
    batch, heads, length, eighths = size
    small = (batch, heads, length, 8 * eighths)
    # 32 times the batch: the key-split heuristic alone may not undo it
    large = (32 * batch, heads, length, 8 * eighths)
    for make in (
        lambda q: scratch.efficient_backward_scratch(
            q, q, q, dtype, capability, deterministic=True
        ),
        lambda q: scratch.flash_backward_scratch(q, q, "float16"),
        lambda q: scratch.cudnn_backward_scratch(q, q, q, "float16"),
    ):
        low, expected, high = peak(make(small))
        assert 0 < low <= expected <= high
        assert all(a <= b for a, b in zip(peak(make(small)), peak(make(large)), strict=True))


@pytest.mark.parametrize("length", [1, 31, 32, 100])
def test_saved_shapes_that_the_documentation_states(length: int) -> None:
    torch = pytest.importorskip("torch")
    aten = torch.ops.aten
    q = torch.empty(2, 4, length, 64, device="meta", dtype=torch.bfloat16)
    flash = aten._scaled_dot_product_flash_attention(q, q, q)
    assert flash[1].shape == (2, 4, length) and flash[1].dtype == torch.float32
    efficient = aten._scaled_dot_product_efficient_attention(q, q, q, None, True)
    assert efficient[1].shape == (2, 4, -(-length // 32) * 32)
    cudnn = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
    assert cudnn[1].shape == (2, 4, length, 1)
