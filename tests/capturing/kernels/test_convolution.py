"""Convolution backends by PyTorch's checks; the workspace model's bounds and monotony."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.capturing.kernels.convolution import (
    Convolution,
    ConvSettings,
    Direction,
    conv_backend,
    conv_workspace,
    trial_workspace,
)

V100, A10 = ConvSettings((7, 0)), ConvSettings((8, 6))
H200 = ConvSettings((9, 0), sm_count=132)
VGG = Convolution(
    (8, 64, 86, 86), (64, 64, 3, 3), (8, 64, 86, 86), "float32", (1, 1), (1, 1), (1, 1)
)
DEPTHWISE = Convolution(
    (8, 64, 28, 28), (64, 1, 3, 3), (8, 64, 28, 28), "float32", (1, 1), (1, 1), (1, 1), groups=64
)


def test_ordinary_convolutions_take_cudnn() -> None:
    assert conv_backend(VGG, A10) == "cudnn"
    assert conv_backend(replace(VGG, dtype="float64"), A10) == "cudnn"
    assert conv_backend(replace(VGG, transposed=True), A10) == "cudnn_transpose"
    assert conv_backend(VGG, replace(A10, cudnn_enabled=False)) == "slow"
    assert conv_backend(replace(VGG, x=(0, 64, 86, 86)), A10) == "empty"
    wide = replace(VGG, transposed=True, output_padding=(1, 1))
    assert conv_backend(wide, A10) == "slow"


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "depthwise2d"),
        ({"dtype": "bfloat16"}, "depthwise2d"),
        ({"dtype": "float16"}, "cudnn"),
        ({"dtype": "float16", "dilation": (2, 2)}, "depthwise2d"),
        ({"dtype": "float16", "stride": (2, 2)}, "depthwise2d"),
        ({"dtype": "float16", "stride": (2, 2), "x": (1, 64, 28, 28)}, "cudnn"),
        ({"dtype": "float16", "x": (8, 64, 6, 6)}, "depthwise2d"),
        ({"dtype": "float16", "x": (8, 16, 28, 28), "groups": 16, "w": (16, 1, 3, 3)},
         "depthwise2d"),
        ({"dtype": "float16", "w": (64, 1, 7, 7)}, "depthwise2d"),
        ({"channels_last": True}, "cudnn"),
        ({"w": (128, 1, 3, 3)}, "depthwise2d"),
        ({"groups": 32, "w": (64, 2, 3, 3)}, "cudnn"),
        ({"groups": 64, "w": (64, 1, 3, 3), "transposed": True}, "cudnn_transpose"),
    ],
)  # fmt: skip
def test_depthwise(changes: dict[str, Any], backend: str) -> None:
    assert conv_backend(replace(DEPTHWISE, **changes), A10) == backend


def test_native_depthwise_has_no_workspace() -> None:
    for direction in Direction:
        assert conv_workspace(DEPTHWISE, direction, A10).high == 0


def test_tensor_cores_on_nchw_hold_channels_last_copies() -> None:
    copies = 4 * (2 * 8 * 86 * 86 * 64 + 64 * 64 * 9)
    assert conv_workspace(VGG, Direction.FORWARD, A10).bytes == copies
    no_tf32 = replace(A10, allow_tf32=False)
    assert conv_workspace(VGG, Direction.FORWARD, no_tf32).bytes == 0
    assert conv_workspace(VGG, Direction.FORWARD, V100).bytes == 0
    assert conv_workspace(replace(VGG, dtype="float16"), Direction.FORWARD, V100).bytes > 0
    last = replace(VGG, channels_last=True)
    assert conv_workspace(last, Direction.FORWARD, A10).bytes == 0


def test_channels_are_padded_to_sixteen_bytes() -> None:
    image = replace(VGG, x=(8, 3, 86, 86), w=(64, 3, 3, 3))
    pixels = 8 * 86 * 86
    expected = 4 * (pixels * 4 + pixels * 64 + 64 * 4 * 9)
    assert conv_workspace(image, Direction.FORWARD, A10).bytes == expected


def test_a_pointwise_kernel_may_run_as_a_matrix_product() -> None:
    point = replace(VGG, w=(64, 64, 1, 1), padding=(0, 0))
    row = conv_workspace(point, Direction.FORWARD, A10)
    assert row.bytes == 0 < row.high


def test_the_weight_gradient_may_be_split_over_the_batch() -> None:
    data = conv_workspace(VGG, Direction.BACKWARD_DATA, A10)
    weight = conv_workspace(VGG, Direction.BACKWARD_FILTER, A10)
    assert weight.bytes - data.bytes == 4 * 64 * 64 * 9


def test_benchmark_mode_tries_every_plan_in_a_workspace_for_the_largest() -> None:
    trying = replace(A10, benchmark=True)
    trial = trial_workspace(VGG, trying)
    assert trial is not None
    assert trial.low == 0
    assert trial.bytes >= conv_workspace(VGG, Direction.FORWARD, trying).bytes
    assert trial.high > conv_workspace(VGG, Direction.FORWARD, trying).high
    assert trial_workspace(VGG, A10) is None
    assert trial_workspace(DEPTHWISE, trying) is None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 32),
    st.sampled_from([1, 3, 4, 64]),
    st.sampled_from([1, 8, 128]),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([7, 30, 86]),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.sampled_from(list(Direction)),
    st.sampled_from([V100, A10]),
)
def test_bounds_hold_and_grow_with_the_batch(
    batch: int,
    channels: int,
    out: int,
    kernel: int,
    side: int,
    dtype: str,
    direction: Direction,
    where: ConvSettings,
) -> None:
    def workspace(size: int) -> tuple[int, int, int]:
        pad = kernel // 2
        conv = Convolution(
            (size, channels, side, side),
            (out, channels, kernel, kernel),
            (size, out, side, side),
            dtype,
            (1, 1),
            (pad, pad),
            (1, 1),
        )
        row = conv_workspace(conv, direction, where)
        return row.low, row.bytes, row.high

    small, large = workspace(batch), workspace(2 * batch)
    assert small[0] <= small[1] <= small[2]
    assert all(a <= b for a, b in zip(small, large, strict=True))


FORWARD, DATA, FILTER = Direction
MEASURED = [
    # on an H200, cuDNN 9.19, fp32 with TF32: direction, x, w, stride, groups, channels-last, bytes
    (FORWARD, (32, 64, 144, 144), (64, 64, 3, 3), 1, 1, False, 339_886_592),
    (FORWARD, (32, 64, 144, 144), (128, 64, 3, 3), 2, 1, False, 170_164_736),
    (DATA, (480, 128, 43, 43), (128, 128, 3, 3), 1, 1, False, 910_163_968),
    (FILTER, (480, 256, 10, 10), (512, 256, 3, 3), 1, 1, False, 156_500_992),
    (FILTER, (450, 208, 6, 6), (208, 208, 1, 1), 1, 1, False, 77_875_712),
    (FILTER, (200, 512, 11, 11), (256, 512, 1, 1), 1, 1, False, 104_857_600),
    (FORWARD, (200, 256, 22, 22), (64, 256, 1, 1), 1, 1, False, 0),
    (FORWARD, (480, 3, 86, 86), (64, 3, 3, 3), 1, 1, False, 0),
    (FORWARD, (450, 48, 43, 43), (48, 8, 3, 3), 2, 6, False, 201_585_664),
]
OUTLIERS = [
    (FILTER, (450, 208, 11, 11), (208, 8, 3, 3), 2, 26, False, 98_958_848),
    (FILTER, (233, 96, 21, 21), (96, 1, 7, 7), 1, 96, True, 331_350_016),
    (DATA, (233, 384, 5, 5), (768, 384, 2, 2), 2, 1, True, 7_796_224),
]


@pytest.mark.parametrize("row", MEASURED + OUTLIERS)
def test_measured_workspaces(row: tuple[Any, ...]) -> None:
    direction, x, w, stride, groups, channels_last, nbytes = row
    size = (x[2] + 2 * (w[2] // 2) - w[2]) // stride + 1
    conv = Convolution(
        x,
        w,
        (x[0], w[0], size, size),
        "float32",
        (stride, stride),
        (w[2] // 2, w[2] // 2),
        (1, 1),
        groups,
        channels_last=channels_last,
    )
    found = conv_workspace(conv, direction, H200)
    # The allocator's blocks are multiples of 512 bytes.
    assert found.low - 512 <= nbytes <= found.high + 512
    if row in MEASURED:
        assert found.bytes == pytest.approx(nbytes, rel=0.03)
    # What is known of other cards is less, but the measured engines exist there too.
    ampere = conv_workspace(conv, direction, A10)
    assert ampere.low == 0 and ampere.bytes <= ampere.high
    if conv.pointwise and direction is FILTER:
        assert nbytes <= ampere.high + 512
