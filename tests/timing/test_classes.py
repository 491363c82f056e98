"""Which kernels operators run, and what products compute in tiles."""

from __future__ import annotations

import pytest

from memplan.timing.classes import kernels
from memplan.timing.operands import Tensor, parsed
from memplan.timing.products import quantised_flops

SMS = 82


def kinds(name: str, text: str, flops: int = 0, moved: int = 1 << 20) -> list[str]:
    return [one.kind for one in kernels(name, text, flops, moved, SMS)]


def test_texts_of_arguments_are_read_back() -> None:
    found = parsed("2x3:float16:t [1,-2] - True 0.5 :int64:c 3*")
    assert found == [
        Tensor((2, 3), "float16", "t"), (1, -2), "-", "True", "0.5", Tensor((), "int64", "c"), "3*",
    ]  # fmt: skip
    assert parsed("") == []


def test_large_products_lose_little_to_tiles_and_small_ones_much() -> None:
    whole = 2.0 * 8192**3
    assert whole < quantised_flops(8192, 8192, 8192, 1, 108) < 1.1 * whole
    assert quantised_flops(130, 130, 512, 1, 108) > 4 * 2 * 130 * 130 * 512
    many = quantised_flops(64, 64, 256, 1000, 108)
    assert many < 300 * quantised_flops(64, 64, 256, 1, 108)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("aten.mm.default", "64x64:float16:c 64x128:float16:t", "matmul"),
        ("aten.mm.default", "64x65:float16:c 65x128:float16:c", "matmul_unaligned"),
        ("aten.bmm.default", "9x64x64:float16:c 9x64x64:float16:c", "matmul_batched"),
        ("aten.bmm.default", "9x64x197:float16:c 9x197x64:float16:c", "matmul_batched_unaligned"),
    ],
)
def test_products_by_their_alignment(name: str, text: str, expected: str) -> None:
    assert kinds(name, text, flops=10**9) == [expected]


def conv(channels: int, size: int, groups: int, layout: str) -> str:
    return (
        f"8x{channels}x56x56:float16:{layout} "
        f"{channels}x{channels // groups}x{size}x{size}:float16:{layout} "
        f"- [1,1] [{size // 2},{size // 2}] [1,1] False [0,0] {groups}"
    )


@pytest.mark.parametrize(
    ("channels", "size", "groups", "layout", "expected"),
    [
        (64, 3, 1, "n", ["conv_large"]),
        (64, 3, 1, "c", ["conv_large", "conv_layout_large"]),
        (64, 1, 1, "n", ["conv_1x1"]),
        (64, 3, 4, "n", ["conv_grouped_nhwc"]),
        (256, 3, 4, "c", ["conv_grouped_wide_nchw"]),
        (64, 3, 64, "c", ["depthwise_forward_nchw"]),
        (64, 9, 64, "n", ["depthwise_wide_forward_nhwc"]),
    ],
)
def test_convolutions_by_kind_and_layout(
    channels: int, size: int, groups: int, layout: str, expected: list[str]
) -> None:
    flops = 2 * 8 * channels * 56 * 56 * channels // groups * size * size
    text = conv(channels, size, groups, layout)
    assert kinds("aten.convolution.default", text, flops) == expected


def test_a_backward_convolution_has_a_kernel_for_each_gradient_asked_for() -> None:
    text = (
        "8x64x56x56:float16:n 8x64x56x56:float16:n 64x64x3x3:float16:n [64] [1,1] [1,1] [1,1] "
        "False [0,0] 1 [{},True,True]"
    )
    asked = [kinds("aten.convolution_backward.default", text.format(one), 10**9)
             for one in ("True", "False")]  # fmt: skip
    assert asked[0] == ["conv_large", "conv_large_weight", "reduction"]
    assert asked[1] == ["conv_large_weight", "reduction"]


def test_causal_attention_skips_half() -> None:
    q = "2x8x128x64:bfloat16:s"
    name = "aten._scaled_dot_product_flash_attention.default"
    whole, half = (
        kernels(name, f"{q} {q} {q} 0.0 {causal}", 1000, 10, SMS) for causal in ("False", "True")
    )
    assert whole[0].kind == "attention_forward" and half[0].flops == whole[0].flops / 2


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("aten.relu_.default", "8x8:float16:c", "pointwise"),
        ("aten.mul.Tensor", "8x8x4x4:float16:c 8x8x1x1:float16:c", "broadcast"),
        ("aten.clone.default", "8x8:float16:s", "transpose"),
        ("aten._to_copy.default", "8x8:float16:c", "copy"),
        ("aten.sum.dim_IntList", "8x8:float16:c [0] True", "reduction"),
        ("aten.native_batch_norm.default", "8x8x4x4:float16:n", "batch_norm_forward_nhwc"),
        ("aten.native_layer_norm_backward.default", "8x8:float32:c", "layer_norm_backward"),
        ("aten._softmax.default", "8x8:float16:c", "softmax_forward"),
        ("aten.max_pool2d_with_indices_backward.default", "8x8x2x2:float16:c", "pool_backward"),
        ("aten.embedding_dense_backward.default", "8x8:float32:c", "scatter"),
        ("aten.cat.default", "3* 1", "join"),
        ("aten._foreach_add_.List", "", "foreach"),
        ("aten._fused_adamw_.default", "", "fused_optimizer"),
        ("inductor.triton_poi_fused_add_0", "", "inductor"),
        ("inductor.triton_red_fused_sum_1", "", "inductor_reduction"),
    ],
)
def test_other_operators_by_name(name: str, text: str, expected: str) -> None:
    assert kinds(name, text) == [expected]


def test_views_run_no_kernel() -> None:
    assert kernels("aten.view.default", "", 0, 0, SMS) == []
