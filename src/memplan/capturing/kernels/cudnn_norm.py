"""Batch normalisation: cuDNN's kernel or PyTorch's own, and what each takes beside its outputs.

Source: pytorch `native/Normalization.cpp` (`_select_batch_norm_backend`),
`native/cudnn/BatchNorm.cpp` and `native/cuda/Normalization.{cu,cuh}`, releases 2.6 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.capturing.kernels.model import MIB, Scratch, Shape, exactly, numel

_MOST_TRAINING, _MOST_EVALUATION = 880_801, 65_535
_INT32 = 2**31 - 1
# `flexible_launch_configs` splits the reduction over at most this many blocks.
_MOST_BLOCKS = 128


@dataclass(frozen=True)
class BatchNorm:
    """One call; `shape` is (N, C, …)."""

    shape: Shape
    dtype: str
    weight_dtype: str | None = "float32"
    """None: not affine."""
    training: bool = True
    channels_last: bool = False
    cudnn_enabled: bool = True


def batch_norm_backend(call: BatchNorm) -> str:
    """`cudnn` or `native`."""
    dtype, weight = call.dtype, call.weight_dtype
    if weight is None or "bfloat16" in (dtype, weight) or not call.cudnn_enabled:
        return "native"
    if dtype == "float16" and weight != "float32":
        return "native"
    if len(call.shape) < 3:
        return "native"
    most = _MOST_TRAINING if call.training else _MOST_EVALUATION
    fits = call.shape[0] <= most and numel(call.shape) < _INT32
    return "cudnn" if fits else "native"


def batch_norm_scratch(call: BatchNorm, *, backward: bool = False) -> list[Scratch]:
    """Scratch of one call."""
    channels = call.shape[1]
    if batch_norm_backend(call) == "cudnn":
        persistent = call.training and call.channels_last
        return [Scratch("batch norm workspace", 0, 0, 2 * MIB)] if persistent else []
    if not call.training:
        return []
    out: list[Scratch] = []
    if backward:
        out += [exactly(name, 4 * channels) for name in ("sum_dy", "sum_dy_xmu")]
    if call.channels_last:
        sums = (2 if backward else 4) * 4 * channels * _MOST_BLOCKS
        out += [Scratch("staging_data", 0, sums // 4, sums), Scratch("semaphores", 0, 512, 4096)]
    return out
