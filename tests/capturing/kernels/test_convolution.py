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
    WorkspaceModel,
    conv_backend,
    conv_workspace,
    trial_workspace,
)

V100, A10 = ConvSettings((7, 0)), ConvSettings((8, 6))
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


def test_the_three_dimensional_half_precision_fault_of_old_cudnn() -> None:
    volume = Convolution(
        (1, 8, 8, 8, 8), (8, 8, 3, 3, 3), (1, 8, 8, 8, 8), "bfloat16", (1,) * 3, (1,) * 3, (1,) * 3
    )
    assert conv_backend(volume, replace(A10, cudnn_version=91002)) == "slow"
    assert conv_backend(volume, replace(A10, cudnn_version=91900)) == "cudnn"


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
    half = WorkspaceModel(pointwise=0.5)
    assert 0 < conv_workspace(point, Direction.FORWARD, A10, model=half).bytes < row.high


def test_the_weight_gradient_may_be_split_over_the_batch() -> None:
    data = conv_workspace(VGG, Direction.BACKWARD_DATA, A10)
    weight = conv_workspace(VGG, Direction.BACKWARD_FILTER, A10)
    assert weight.bytes - data.bytes == 4 * 64 * 64 * 9


def test_a_workspace_that_cannot_be_had_is_not_taken() -> None:
    need = conv_workspace(VGG, Direction.FORWARD, A10).bytes
    enough = conv_workspace(VGG, Direction.FORWARD, A10, free_bytes=need)
    assert (enough.bytes, enough.high) == (need, need)
    short = conv_workspace(VGG, Direction.FORWARD, A10, free_bytes=need - 1)
    assert (short.low, short.bytes, short.high) == (0, 0, need - 1)
    assert conv_workspace(VGG, Direction.FORWARD, A10, free_bytes=-5).high == 0


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
