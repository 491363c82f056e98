"""Staging buffers of reductions, against requests that a real H100 logged."""

from __future__ import annotations

import csv
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.capturing.kernels.model import Scratch
from memplan.capturing.kernels.reduction import merge, reduction_scratch

H100: dict[str, Any] = {"sm_count": 132, "capability": (9, 0)}
A100: dict[str, Any] = {"sm_count": 108, "capability": (8, 0)}
LOG = "allocator/transformer_45154MiB.csv"


def sizes(rows: list[Scratch]) -> list[int]:
    assert all(row.low == row.high for row in rows)
    return [row.bytes for row in rows]


# Logits of 512 tokens and 10,000 words that lie word by word, and hidden states of 2,560.
LOGGED = [
    (reduction_scratch((10_000, 512), [0], accumulator=16, **H100), [164_626_432, 16]),
    (reduction_scratch((10_000, 512), [0], **H100), [41_156_608, 16]),
    (reduction_scratch((2_560, 512), [0], half=True, **H100), [10_485_760, 16]),
]


@pytest.mark.parametrize(("rows", "expected"), LOGGED)
def test_sizes_that_a_real_gpu_requested(rows: list[Scratch], expected: list[int]) -> None:
    assert sizes(rows) == expected


def test_those_sizes_are_in_the_real_log() -> None:
    folder = os.environ.get("MEMPLAN_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data")
    path = Path(folder) / LOG
    if not path.exists():
        pytest.skip("the shared data folder is absent")
    with path.open() as file:
        requests = [int(row["bytes"]) for row in csv.DictReader(file) if row["action"] == "alloc"]
    pairs = set(itertools.pairwise(requests))
    for _rows, expected in LOGGED:
        assert tuple(expected) in pairs


def test_strides_decide_not_the_order_of_the_dimensions() -> None:
    as_it_lies = reduction_scratch((10_000, 512), [0], **H100)
    transposed = reduction_scratch((512, 10_000), [1], strides=(1, 512), **H100)
    assert sizes(transposed) == sizes(as_it_lies)
    rows = reduction_scratch((512, 10_000), [-1], **H100)
    assert rows == []


def test_bias_gradients_of_a_linear_layer() -> None:
    assert sizes(reduction_scratch((8_192, 768), [0], **A100)) == [48 << 20, 24]
    assert reduction_scratch((64, 768), [0], **A100) == []


def test_a_whole_tensor_is_staged_by_a_few_values() -> None:
    rows = reduction_scratch((8_192, 768), None, **A100)
    assert 0 < rows[0].bytes < 16_384 and rows[1].bytes == 4
    assert rows == reduction_scratch((8_192, 768), [0, 1], **A100)


def test_nothing_for_empty_and_small_tensors() -> None:
    assert reduction_scratch((0, 5), [0], **A100) == []
    assert reduction_scratch((), None, **A100) == []
    assert reduction_scratch((7,), [0], **A100) == []


def test_neighbouring_dimensions_are_merged() -> None:
    bias = merge((8, 64, 56, 56), [0, 2, 3])
    assert (bias.outputs, bias.inputs, bias.inner, bias.one_dimension) == (
        64,
        8 * 3136,
        True,
        False,
    )
    last = merge((4, 1, 6), [0])
    assert (last.outputs, last.inputs, last.inner, last.inner_size) == (6, 4, False, 6)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40_000), st.integers(1, 5_000), st.sampled_from([0, 1]), st.booleans())
def test_the_buffer_never_holds_more_than_the_gpu_can_run(
    rows: int, columns: int, dim: int, half: bool
) -> None:
    found = reduction_scratch((rows, columns), [dim], half=half, **A100)
    if found:
        buffer, semaphores = sizes(found)
        blocks = semaphores // 4
        # As many values as outputs, times block width and vector at most, for every split.
        outputs = columns if dim == 0 else rows
        splits = buffer / (4 * outputs * (128 if dim == 0 else 1))
        assert blocks * splits <= 108 * 64 + blocks
