"""Global-memory staging of PyTorch's reductions (sum, mean, norm, var, min, max, argmax, …).

Source: pytorch `native/cuda/Reduce.cuh` (`setReduceConfig`, `ReduceConfig::global_memory_size`). A
reduction is split over thread blocks when a thread would have 256 values or more and the outputs
alone do not fill the GPU; the partial results then go through a buffer and one semaphore a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.capturing.kernels.model import Scratch, Shape, ceil_div, exactly

_WARP = 32
_MOST_THREADS = 512
_LEAST_VALUES = 16
_MOST_VALUES = 256


@dataclass(frozen=True)
class Reduction:
    """A reduction of a contiguous tensor, merged to the outputs and the inputs of each."""

    outputs: int
    inputs: int
    inner: bool
    """The fastest dimension is reduced."""
    one_dimension: bool
    """The reduced dimensions are neighbours."""
    inner_size: int = 1
    """Size of the fastest run of dimensions that are kept."""


def merge(shape: Shape, dims: Sequence[int] | None) -> Reduction:
    """`dims` None: all of them."""
    rank = len(shape)
    reduced = set(range(rank)) if dims is None else {dim % rank for dim in dims}
    sizes = [(size, dim in reduced) for dim, size in enumerate(shape) if size != 1]
    outputs = inputs = 1
    runs = 0
    before = False
    for size, is_reduced in sizes:
        if is_reduced:
            inputs *= size
            runs += not before
        else:
            outputs *= size
        before = is_reduced
    inner = not sizes or sizes[-1][1]
    inner_size = 1
    for size, is_reduced in reversed(sizes):
        if is_reduced:
            break
        inner_size *= size
    return Reduction(outputs, inputs, inner, runs == 1, inner_size)


def max_threads_per_sm(capability: tuple[int, int]) -> int:
    """Resident threads of one multiprocessor (CUDA C++ programming guide, compute capabilities)."""
    if capability == (7, 5):
        return 1024
    return 1536 if capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12 else 2048


def reduction_scratch(
    shape: Shape,
    dims: Sequence[int] | None,
    *,
    strides: Sequence[int] | None = None,
    sm_count: int,
    capability: tuple[int, int],
    accumulator: int = 4,
    half: bool = False,
) -> list[Scratch]:
    """Staging buffer and semaphores of one reduction, or nothing. `dims` None or empty: all.

    `strides` None: contiguous. Exact for any dense tensor, in whichever order its dimensions lie.
    `accumulator`: bytes of the type that is accumulated (4 for sums of half and single precision,
    8 for double, 12 for a variance, 16 for an index beside its value). `half`: elements of 2
    bytes. Where the outputs lie innermost the buffer has room for every thread of a block and is
    much larger than what is staged: 48 MiB for the gradient of 768 biases over 8,192 rows.
    """
    if 0 in shape:
        return []
    sizes, reduced = _as_it_lies(shape, dims, strides)
    config = _configure(merge(sizes, reduced), half, sm_count, max_threads_per_sm(capability))
    if config is None:
        return []
    staged, blocks = config
    return [
        exactly("reduction buffer", accumulator * staged),
        exactly("reduction semaphores", 4 * blocks),
    ]


def _as_it_lies(
    shape: Shape, dims: Sequence[int] | None, strides: Sequence[int] | None
) -> tuple[Shape, Sequence[int] | None]:
    """Dimensions from the largest stride to the smallest, as TensorIterator orders them."""
    if not dims or not shape:
        return shape, None
    if strides is None:
        return shape, dims
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    reduced = {dim % len(shape) for dim in dims}
    return [shape[dim] for dim in order], [i for i, dim in enumerate(order) if dim in reduced]


def _power_of_two(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)


def _configure(
    red: Reduction, half: bool, sm_count: int, threads_per_sm: int
) -> tuple[int, int] | None:
    """(staged values, blocks along the outputs), or None when one block does each output."""
    vector = 1
    if red.inner:
        width, height = red.inputs, red.outputs
        if width >= 128 and red.one_dimension:
            width //= 8 if half else 4
    else:
        vector = math.gcd(red.inner_size, 4)
        width, height = red.outputs // vector, red.inputs
    most = _MOST_THREADS // vector
    width_2 = most if width >= most else _power_of_two(width)
    height_2 = most if height >= most else _power_of_two(height)
    block_height = min(height_2, most // min(width_2, _WARP))
    block_width = min(width_2, most // block_height)

    step_input, step_output = (block_width, 1) if red.inner else (1, block_width)
    values = ceil_div(red.inputs, step_input)
    split_warps = values >= min(block_height * 16, _MOST_VALUES)
    if split_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    values = ceil_div(red.inputs, step_input)
    grid = ceil_div(red.outputs // vector, step_output)
    target = sm_count * (threads_per_sm // (block_width * block_height))
    if not (split_warps and values >= _MOST_VALUES and grid <= target):
        return None
    splits = max(
        min(ceil_div(target, grid), ceil_div(values, _LEAST_VALUES)),
        ceil_div(values, _MOST_VALUES),
    )
    if splits <= 1:
        return None
    staged = red.outputs * splits
    return (staged if red.inner else staged * block_width * vector), grid
