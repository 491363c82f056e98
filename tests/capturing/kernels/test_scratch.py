"""Scratch rules by operator: sizes their sources state, thresholds, and bounds for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.capturing.kernels.calls import OpCall, radix_sort_temporary
from memplan.capturing.kernels.model import Scratch
from memplan.capturing.kernels.scratch import SCRATCH, scratch_for
from tests.capturing.kernels.stages import peak


def call(op: str, *shapes: Sequence[int], dtype: str = "float32", **args: object) -> OpCall:
    return OpCall(f"aten.{op}", shapes, [dtype] * len(shapes), args=args)


def by_name(rows: list[Scratch]) -> dict[str, int]:
    return {row.name: row.bytes for row in rows}


def test_short_rows_are_sorted_in_place_and_long_ones_are_not() -> None:
    assert scratch_for(call("sort", (1000, 4096), dim=-1)) == []
    rows = by_name(scratch_for(call("sort", (1000, 4097), dim=-1)))
    assert set(rows) == {"index pairs 0", "sort temporary"}
    few = by_name(scratch_for(call("sort", (100, 5000), dim=-1)))
    assert few["index pairs 0"] == few["index pairs 1"] == 100 * 5000 * 8
    one = by_name(scratch_for(call("sort", (1_000_000,), dim=0)))
    assert one["initial indices"] == 8_000_000
    assert one["sort temporary"] > 12_000_000
    across = by_name(scratch_for(call("sort", (5000, 10), dim=0)))
    assert across["values"] == 5000 * 10 * 4 and across["indices"] == 5000 * 10 * 8


def test_topk_sorts_only_many_results() -> None:
    few = scratch_for(call("topk", (8, 100_000), k=50))
    assert max(row.high for row in few) <= 1 << 20
    many = replace(call("topk", (8, 100_000), k=5000), out_shapes=[(8, 5000)])
    assert by_name(scratch_for(many))["sorted results"] == 8 * 5000 * 12


def embedding(tokens: int, weights: int, columns: int = 768, dtype: str = "float32") -> OpCall:
    return OpCall(
        "aten.embedding_dense_backward",
        [(1, tokens, columns), (1, tokens)],
        [dtype, "int64"],
        args={"num_weights": weights},
    )


def test_embedding_backward_of_gpt2() -> None:
    assert scratch_for(embedding(3072, 50_257)) == []
    rows = by_name(scratch_for(embedding(8192, 50_257)))
    assert rows["grad_weight_per_segment"] == (8192 // 10 + 8192) * 768 * 4
    assert rows["sorted_indices"] == rows["orig_indices"] == 8192 * 8
    half = by_name(scratch_for(embedding(8192, 50_257, dtype="bfloat16")))
    assert half == rows  # accumulated in float


def test_a_small_table_may_be_summed_up_in_place() -> None:
    rows = {row.name: row for row in scratch_for(embedding(65_536, 2))}
    staged = rows["grad_weight_per_segment"]
    assert (staged.low, staged.bytes) == (0, (6553 + 2) * 768 * 4)
    fixed = replace(embedding(65_536, 2), deterministic=True)
    [known] = [row for row in scratch_for(fixed) if row.name == "grad_weight_per_segment"]
    assert known.low == known.high


def test_index_put_sorts_only_to_accumulate() -> None:
    put = call("index_put_", (50_000, 64), (4096,), (4096, 64), accumulate=True)
    assert by_name(scratch_for(put))["linear index"] == 4096 * 8
    assert scratch_for(replace(put, args={"accumulate": False})) == []


def test_indexing_with_a_mask_makes_its_coordinates() -> None:
    masked = OpCall(
        "aten.index", [(8, 128, 64), (8, 128)], ["float32", "bool"], out_shapes=[(300, 64)]
    )
    assert by_name(scratch_for(masked)) == {"coordinates": 300 * 2 * 8}
    assert scratch_for(replace(masked, dtypes=["float32", "int64"])) == []


def test_only_one_dimensional_scans_use_a_library() -> None:
    assert scratch_for(call("cumsum", (64, 100), dim=1)) == []
    assert scratch_for(call("cumsum", (1, 6400), dim=1)) != []


def test_bias_gradient_through_the_registry() -> None:
    rows = by_name(scratch_for(call("sum", (8192, 768), dim=[0], keepdim=True)))
    assert rows == {"reduction buffer": 48 << 20, "reduction semaphores": 24}
    pairs = by_name(scratch_for(call("max", (8192, 768), dim=0)))
    assert pairs["reduction buffer"] == 4 * (48 << 20)
    assert scratch_for(call("sum", (64, 16), dim=[0])) == []


def test_losses_keep_what_is_not_reduced() -> None:
    rows = by_name(scratch_for(call("mse_loss", (64, 1000), (64, 1000), reduction=1)))
    assert rows["unreduced loss"] == 64_000 * 4
    assert scratch_for(call("mse_loss", (64, 1000), (64, 1000), reduction=0)) == []
    assert scratch_for(call("binary_cross_entropy", (64, 9), (64, 9), reduction=1)) == []
    assert len(scratch_for(call("binary_cross_entropy_with_logits", (64,), (64,)))) == 2


def test_layer_norm_backward_only_for_very_long_inputs() -> None:
    def norm(rows: int, columns: int = 768) -> list[Scratch]:
        shapes = [(rows, columns), (rows, columns), (rows, 1), (rows, 1), (columns,), (columns,)]
        return scratch_for(call("native_layer_norm_backward", *shapes, normalized_shape=[columns]))

    assert norm(8192) == []
    assert by_name(norm(131_072)) == {
        "dgamma_blocks": 1365 * 768 * 4,
        "dbeta_blocks": 1365 * 768 * 4,
    }
    assert norm(131_072, 4096) == []


def test_group_norm_and_lists_of_tensors() -> None:
    rows = by_name(scratch_for(call("native_group_norm", (8, 64, 32, 32), N=8, C=64)))
    assert rows == {"a": 8 * 64 * 4, "b": 8 * 64 * 4}
    norms = by_name(scratch_for(call("_foreach_norm", (1000,), (65_537,), (3,))))
    assert norms == {"output_per_tensor": 3 * 2 * 4}


def test_the_sort_temporary_holds_a_second_copy() -> None:
    row = radix_sort_temporary(100_000, 4, 8)
    assert row.low == 1_200_000 < row.bytes < row.high < 1.3 * row.low


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.integers(1, 700), st.integers(1, 40))
def test_every_rule_gives_ordered_bounds(batch: int, length: int, width: int) -> None:
    shape = (batch, length, width)
    for op in SCRATCH:
        shapes: list[tuple[int, ...]] = [shape] * 3
        if "embedding" in op:
            shapes = [(batch, 9 * length, width), (batch, 9 * length)]
        args = {"dim": 1, "accumulate": True, "k": 10, "n": length, "num_weights": 100,
                "normalized_shape": [width], "return_inverse": True, "reduction": 1}  # fmt: skip
        found = OpCall(op, shapes, ["float32"] * len(shapes), args=args, out_shapes=[shape])
        low, expected, high = peak(scratch_for(found))
        assert 0 <= low <= expected <= high, op


def test_empty_tensors_and_unknown_operators_take_nothing() -> None:
    assert scratch_for(call("sum", (0, 5), dim=[0])) == []
    assert scratch_for(call("add", (5, 5))) == []


def test_every_operator_named_exists() -> None:
    torch = pytest.importorskip("torch")
    missing = [op for op in SCRATCH if not hasattr(torch.ops.aten, op.removeprefix("aten."))]
    assert missing == []


def test_requests_as_an_h200_made_them() -> None:
    """`gpu_scratch.json` has them."""
    shapes, dtypes = [(8192, 1024), (8192,)], ["float32", "int64"]
    embedding = OpCall("aten.embedding_dense_backward", shapes, dtypes, args={"num_weights": 50257})
    indices = 8 * 8192
    assert [row.bytes for row in scratch_for(embedding)] == [
        *[indices] * 3, 150_015,
        *(indices, 8, indices, 1279),
        *(indices, indices, 1279),
        *(8, 72_088, 36_909_056),
    ]  # fmt: skip
    rows = [(64, 50257)] * 2
    softmax = OpCall("aten._softmax_backward_data", rows, ["float32"] * 2)
    assert [row.bytes for row in scratch_for(softmax)] == [12_865_792]
