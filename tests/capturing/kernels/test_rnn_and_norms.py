"""Recurrent stacks and batch normalisation: sizes and the choice of kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.capturing.kernels import cudnn_norm, rnn
from memplan.capturing.kernels.cudnn_norm import BatchNorm
from memplan.capturing.kernels.rnn import MODES, Rnn

# The job of pytorch issue 2895, as its parameter counts imply it; the frames are inferred.
PUBLISHED = Rnn("LSTM", 123, 320, 4, steps=500, batch=50)


@pytest.mark.parametrize(("mode", "size"), [("LSTM", 736_000_000), ("GRU", 864_000_000)])
def test_reserve_equals_the_published_sizes(mode: str, size: int) -> None:
    assert rnn.reserve(replace(PUBLISHED, mode=mode)).bytes == size


@pytest.mark.parametrize(("mode", "size"), [("LSTM", 17_730_560), ("GRU", 13_169_920)])
def test_workspace_covers_the_published_sizes(mode: str, size: int) -> None:
    row = rnn.workspace(replace(PUBLISHED, mode=mode))
    assert 0 < row.low <= size <= row.high


def test_sizes_measured_on_an_h200() -> None:
    stack = Rnn("LSTM", 650, 650, 2, steps=128, batch=64, dropout=0.2)
    assert rnn.reserve(stack).bytes == 234_957_056
    assert 0.97 < rnn.workspace(stack).bytes / 196_240_384 < 1.03


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_flat_buffer_holds_exactly_the_modules_weights(
    mode: str, bidirectional: bool, bias: bool
) -> None:
    torch = pytest.importorskip("torch")
    kinds = {"RNN_RELU": torch.nn.RNN, "RNN_TANH": torch.nn.RNN}
    kind = kinds.get(mode) or getattr(torch.nn, mode)
    module = kind(7, 12, 3, bias=bias, bidirectional=bidirectional)
    stack = Rnn(mode, 7, 12, 3, 5, 2, bidirectional=bidirectional, bias=bias)
    elements = sum(p.numel() for p in module.parameters())
    assert rnn.weight_count(stack) == elements


def test_projection_weights_are_counted() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.LSTM(7, 12, 2, proj_size=4)
    elements = sum(p.numel() for p in module.parameters())
    assert rnn.weight_count(Rnn("LSTM", 7, 12, 2, 5, 2, proj_size=4)) == elements


def test_evaluation_reserves_nothing_and_packed_sequences_only_their_frames() -> None:
    assert rnn.reserve(replace(PUBLISHED, training=False)).high == 0
    packed = rnn.reserve(replace(PUBLISHED, tokens=12_500))
    assert 2 * packed.bytes == rnn.reserve(PUBLISHED).bytes
    assert rnn.reserve(replace(PUBLISHED, dropout=0.3)).bytes > rnn.reserve(PUBLISHED).bytes


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(MODES), st.integers(1, 4), st.integers(1, 64), st.integers(1, 64))
def test_bounds_hold_and_grow_with_the_batch(
    mode: str, layers: int, steps: int, batch: int
) -> None:
    small = Rnn(mode, 16, 24, layers, steps, batch)
    for rule in (rnn.reserve, rnn.workspace):
        one, two = rule(small), rule(replace(small, batch=2 * batch))
        assert one.low <= two.low and one.bytes <= two.bytes and one.high <= two.high


IMAGE = BatchNorm((8, 64, 56, 56), "float32")


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "cudnn"),
        ({"dtype": "float16"}, "cudnn"),
        ({"dtype": "float16", "weight_dtype": "float16"}, "native"),
        ({"dtype": "bfloat16"}, "native"),
        ({"weight_dtype": "bfloat16"}, "native"),
        ({"weight_dtype": None}, "native"),
        ({"shape": (8, 64)}, "native"),
        ({"cudnn_enabled": False}, "native"),
        ({"shape": (70_000, 4, 1), "training": False}, "native"),
        ({"shape": (70_000, 4, 1)}, "cudnn"),
        ({"shape": (1024, 64, 256, 256)}, "native"),
    ],
)
def test_batch_norm_backend(changes: dict[str, Any], backend: str) -> None:
    assert cudnn_norm.batch_norm_backend(replace(IMAGE, **changes)) == backend


def test_what_batch_norm_takes_for_itself() -> None:
    assert cudnn_norm.batch_norm_scratch(IMAGE) == []
    native = replace(IMAGE, dtype="bfloat16", channels_last=True)
    names = [row.name for row in cudnn_norm.batch_norm_scratch(native, backward=True)]
    assert names == ["sum_dy", "sum_dy_xmu", "staging_data", "semaphores"]
    assert cudnn_norm.batch_norm_scratch(replace(native, training=False)) == []
