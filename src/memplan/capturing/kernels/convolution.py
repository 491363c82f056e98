"""Convolutions on CUDA: the backend PyTorch picks, and a model of cuDNN's workspace.

Backend selection is PyTorch's own (`aten/src/ATen/native/Convolution.cpp`, exact). cuDNN's choice
of an engine is not public, so the workspace is a physical model with bounds: what the layouts and
number formats force the engine to hold. From capability 9.0 it follows 2,389 workspaces measured on
an H200 (cuDNN 9.19); before, three shares are fitted to measured jobs. The workspace is taken from
the caching allocator after the output and freed when the call returns
(`native/cudnn/Conv_v8.cpp`). See docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from memplan.capturing.kernels.model import (
    HALF,
    MIB,
    Scratch,
    Shape,
    ceil_div,
    itemsize,
    numel,
    round_up,
)


class Direction(Enum):
    """What a call computes."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward_data"
    BACKWARD_FILTER = "backward_filter"


@dataclass(frozen=True)
class Convolution:
    """One convolution. Shapes are those of the forward: x (N, C, …), w (K, C / groups, …), y
    (N, K, …); of a transposed one too, where w is (C, K / groups, …)."""

    x: Shape
    w: Shape
    y: Shape
    dtype: str
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1
    transposed: bool = False
    output_padding: Sequence[int] = ()
    channels_last: bool = False
    """`suggest_memory_format` of the input or the weight is channels-last."""

    @property
    def dims(self) -> int:
        return len(self.w) - 2

    @property
    def pointwise(self) -> bool:
        """A matrix product: 1 by 1 kernel, no stride and no padding."""
        return (
            numel(self.w[2:]) == 1
            and all(step == 1 for step in self.stride)
            and not any(self.padding)
        )

    @property
    def depthwise(self) -> bool:
        """`ConvParams::is_depthwise`."""
        channels = self.x[1]
        return (
            not self.transposed
            and channels == self.groups
            and self.groups > 1
            and self.w[0] % channels == 0
        )


@dataclass(frozen=True)
class ConvSettings:
    """Device and switches that decide."""

    capability: tuple[int, int]
    sm_count: int = 108
    allow_tf32: bool = True
    """`torch.backends.cudnn.conv.fp32_precision`; on unless the script says otherwise."""
    deterministic: bool = False
    benchmark: bool = False
    cudnn_enabled: bool = True


_MOST_SPLITS = 8
_SMALL = MIB
_TILE = 128
_STEM = 4
"""Channels of a network's first convolution, for which cuDNN has kernels of their own."""


def conv_backend(conv: Convolution, settings: ConvSettings) -> str:
    """`cudnn`, `cudnn_transpose`, `depthwise2d`, `depthwise3d`, `slow`, or `empty`.

    Source: `_select_conv_backend`, `use_cudnn`, `use_cudnn_depthwise`. A 1-d convolution is to be
    given as the 2-d one it is run as, (N, C, 1, L).
    """
    if 0 in conv.x[:2]:
        return "empty"
    if conv.depthwise:
        if _cudnn_depthwise(conv, settings):
            return "cudnn"
        return "depthwise2d" if conv.dims == 2 else "depthwise3d"
    if _use_cudnn(conv, settings):
        return "cudnn_transpose" if conv.transposed else "cudnn"
    return "slow"


def _use_cudnn(conv: Convolution, settings: ConvSettings) -> bool:
    if not settings.cudnn_enabled:
        return False
    big = (pad >= step for pad, step in zip(conv.output_padding, conv.stride, strict=False))
    return not (conv.transposed and any(big))


def _cudnn_depthwise(conv: Convolution, settings: ConvSettings) -> bool:
    if not settings.cudnn_enabled:
        return False
    if conv.channels_last:
        return True
    if settings.capability < (7, 0) or conv.dtype != "float16" or conv.dims != 2:
        return False
    if any(step != 1 for step in conv.dilation) or conv.x[1] < 32:
        return False
    square = conv.stride[0] == conv.stride[1] or conv.x[2] == 1
    return square and _cudnn_depthwise_is_faster(conv)


def _cudnn_depthwise_is_faster(conv: Convolution) -> bool:
    """`check_cudnn_depthwise_workload_with_filter`, releases up to 2.13."""
    batch, channels, height, width = conv.x
    stride, size = conv.stride[1], conv.w[3]
    if height == 1 and stride == 1:
        return True
    if conv.w[2] != size or size not in (1, 3, 5) or width < 7:
        return False
    if stride != 2:
        return stride == 1
    if batch == 1:
        return size > 1 or width <= 28
    if size == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def conv_workspace(conv: Convolution, direction: Direction, settings: ConvSettings) -> Scratch:
    """Workspace of one cuDNN call; zero for backends that are not cuDNN's."""
    backend = conv_backend(conv, settings)
    if not backend.startswith("cudnn"):
        return Scratch(f"workspace ({backend})", 0, 0, 0)
    if settings.capability >= (9, 0) and _tensor_cores(conv, settings) and conv.dims == 2:
        low, expected, high = _as_measured(conv, direction, settings)
    else:
        low, (expected, high) = 0, _expected_and_high(conv, direction, settings)
    return Scratch(f"cudnn workspace ({direction.value})", min(low, expected), expected, high)


def trial_workspace(conv: Convolution, settings: ConvSettings) -> Scratch | None:
    """What `cudnn.benchmark` takes at the first call of a convolution, to try every plan; None
    where nothing is tried.

    It is as large as the largest plan's, or as can be had; afterwards the allocator's cache is
    emptied (`get_plans_from_find` and `run_single_conv` in `native/cudnn/Conv_v8.cpp`, and
    `findAlgorithm` in `Conv_v7.cpp` before it). Which plans there are is not public: expected are
    the copies that other layouts need and the Winograd tiles, at most twice as much.
    """
    if not settings.benchmark or not conv_backend(conv, settings).startswith("cudnn"):
        return None
    expected = max(_nhwc_copies(conv), _winograd(conv) if _may_use_winograd(conv, settings) else 0)
    return Scratch("cudnn workspace (benchmark)", 0, expected, 2 * expected + _SMALL)


def _expected_and_high(
    conv: Convolution, direction: Direction, settings: ConvSettings
) -> tuple[int, int]:
    """Expected are the copies that layout and precision force: the operands in NHWC, but for
    kernels of 1 by 1, which can be run as a matrix product on NCHW as it lies; and one in fp32 of
    the weight gradient, which may be summed in parts of the batch."""
    splits = 4 * numel(conv.w) if direction is Direction.BACKWARD_FILTER else 0
    transposed = _nhwc_copies(conv) if _needs_nhwc(conv, settings) else 0
    high = transposed + _MOST_SPLITS * splits + _SMALL
    if _tensor_cores(conv, settings):
        high = max(high, transposed + _partial_sums(settings))
        if _sums_by_sample(conv, direction):
            high = max(high, conv.x[0] * splits + 2 * MIB)
    if _may_use_winograd(conv, settings):
        high = max(high, _winograd(conv) + _SMALL)
    return min(splits if conv.pointwise else transposed + splits, high), high


def _as_measured(
    conv: Convolution, direction: Direction, settings: ConvSettings
) -> tuple[int, int, int]:
    """Low, expected and high on tensor cores."""
    x, w, y = _nhwc_copies_of(conv)
    copies, sums = x + w + y, _partial_sums(settings)
    forward, of_filter = direction is Direction.FORWARD, direction is Direction.BACKWARD_FILTER
    splits = _filter_splits(conv, settings) if of_filter else 0
    if conv.depthwise:
        # Large kernels on large pictures; none was taken for pictures of 14 by 14 and smaller ones.
        large = max(conv.w[2:]) > 5 and numel(conv.y[2:]) > 256 and conv.dtype == "float32"
        expected = 4 * (x + y) + sums // 2 if of_filter and large and conv.channels_last else 0
        return 0, expected, 5 * (x + y) + 2 * sums if of_filter else sums
    stem = conv.x[1] <= _STEM
    if conv.channels_last:
        high = sums + (3 * copies // 2 if stem else 4 * numel(conv.w))
        return 0, splits, high + copies if conv.groups > 1 else high
    if stem:
        direct = max(conv.w[2:]) <= 3 and (forward or conv.dtype == "float32")
        return 0, 0 if direct else copies, sums + 3 * copies // 2
    if numel(conv.w[2:]) == 1:
        return _as_measured_pointwise(conv, direction, settings)
    if conv.groups > 1:
        # Of few groups each may be padded to a tile's channels: six copies were measured for four
        # groups of 16 channels, and at most two where all groups have more than a tile's.
        padded = ceil_div(_TILE, conv.w[0] // conv.groups) if conv.w[0] <= _TILE else 0
        return x + y, copies + splits, max(2, min(padded, 16)) * copies + 2 * sums
    # Few channels go in and more come out: the kernel writes NCHW.
    expected = x + w if forward and conv.x[1] <= 64 < conv.w[0] else copies + splits
    return x + w if forward else copies, expected, copies + sums + 4 * numel(conv.w)


def _as_measured_pointwise(
    conv: Convolution, direction: Direction, settings: ConvSettings
) -> tuple[int, int, int]:
    x, w, y = _nhwc_copies_of(conv)
    copies, pixels = x + w + y, numel(conv.y[2:])
    channels = min(conv.x[1], conv.w[0])
    high = copies + _partial_sums(settings)
    if direction is not Direction.BACKWARD_FILTER:
        strided = any(step != 1 for step in conv.stride)
        copied = (strided and channels >= 256) or (1 < pixels < 64 and channels >= 128)
        return 0, x + y if copied else 0, high
    if not _sums_by_sample(conv, direction):
        expected = copies + _filter_splits(conv, settings) if pixels > 1 else 0
        return 0, expected, high
    by_sample = conv.x[0] * 4 * numel(conv.w)
    if channels <= 16:
        expected = 0
    else:
        few = pixels >= 36 and by_sample <= 4 * copies
        expected = by_sample if few else copies + _filter_splits(conv, settings)
    return 0, expected, max(by_sample + 2 * MIB, high)


def _sums_by_sample(conv: Convolution, direction: Direction) -> bool:
    """A batched matrix product on NCHW can give each sample's weight gradient, summed after."""
    pixels = numel(conv.y[2:])
    whole_tiles = pixels < 64 and not conv.x[1] % (2 * _TILE) and not conv.w[0] % (2 * _TILE)
    filters = direction is Direction.BACKWARD_FILTER and conv.pointwise
    return filters and pixels > 1 and not whole_tiles


def _partial_sums(settings: ConvSettings) -> int:
    """Bytes of at most two tiles of 128 by 128 fp32 sums for each multiprocessor."""
    return 2 * settings.sm_count * _TILE * _TILE * 4


def _filter_splits(conv: Convolution, settings: ConvSettings) -> int:
    """fp32 copies of the weight gradient: as many as fill the multiprocessors with tiles."""
    outputs, inputs = conv.w[0] // conv.groups, numel(conv.w[1:])
    tiles = conv.groups * ceil_div(outputs, _TILE) * ceil_div(inputs, _TILE)
    copies = settings.sm_count // tiles
    return copies * 4 * numel(conv.w) if copies > 1 else 0


def _tensor_cores(conv: Convolution, settings: ConvSettings) -> bool:
    if conv.dtype in HALF:
        return settings.capability >= ((8, 0) if conv.dtype == "bfloat16" else (7, 0))
    return conv.dtype == "float32" and settings.allow_tf32 and settings.capability >= (8, 0)


def _needs_nhwc(conv: Convolution, settings: ConvSettings) -> bool:
    """Tensor-core engines want channels last; a grouped convolution has engines of its own."""
    return _tensor_cores(conv, settings) and not conv.channels_last and not conv.depthwise


def _nhwc_copies(conv: Convolution) -> int:
    return sum(_nhwc_copies_of(conv))


def _nhwc_copies_of(conv: Convolution) -> tuple[int, int, int]:
    """Bytes of channels-last copies of x, w and y, channels padded to 16 bytes."""
    size = itemsize(conv.dtype)
    multiple = 16 // size
    outer = numel(conv.x[2:]) * conv.x[0], numel(conv.y[2:]) * conv.y[0]
    x = outer[0] * round_up(conv.x[1], multiple)
    y = outer[1] * round_up(conv.y[1], multiple)
    w = numel(conv.w) // conv.w[1] * round_up(conv.w[1], multiple)
    return x * size, w * size, y * size


def _may_use_winograd(conv: Convolution, settings: ConvSettings) -> bool:
    """The non-fused transform engine: 3 by 3, stride 1, not on tensor cores in TF32."""
    return (
        conv.dims == 2
        and tuple(conv.w[2:]) == (3, 3)
        and all(step == 1 for step in (*conv.stride, *conv.dilation))
        and conv.groups == 1
        and conv.dtype in (*HALF, "float32")
    )


def _winograd(conv: Convolution) -> int:
    """Transformed tiles of F(4 by 4, 3 by 3): 6 by 6 values for each 4 by 4 outputs, in fp32."""
    if conv.dims != 2:
        return _nhwc_copies(conv)
    tiles = conv.y[0] * ceil_div(conv.y[2], 4) * ceil_div(conv.y[3], 4)
    channels = conv.x[1] + conv.y[1]
    return 36 * 4 * (tiles * channels + conv.w[0] * conv.w[1])
