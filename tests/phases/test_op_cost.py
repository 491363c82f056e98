from __future__ import annotations

import msgspec
import numpy as np
import pytest

from memplan.phases.op_cost import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    SHORTEST_KERNEL_SECONDS,
    op_seconds,
    storage_bytes,
)
from memplan.types.builder import TraceBuilder
from memplan.types.device import DeviceProfile, find_profile
from memplan.types.trace import EventKind, Trace, TraceMeta

CARD = find_profile("a100-80gb")
FAST, SLOW = 10**13, 10**10


class Work:
    """Builds operators that read one storage of a dtype and write another."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()

    def op(self, name: str, dtype: str, flops: int, moved: int, *, nbytes: int = 1 << 30) -> None:
        builder = self.builder
        source, target = (builder.new_storage(dtype=dtype) for _ in range(2))
        builder.append(EventKind.ALLOC, source, nbytes)
        builder.begin_op(name, reads=[source])
        builder.op_work(flops=flops, moved_bytes=moved)
        builder.op_writes([target])
        builder.append(EventKind.ALLOC, target, nbytes)

    def trace(self) -> Trace:
        return self.builder.build(TraceMeta())


def seconds(name: str, dtype: str, flops: int, moved: int, card: DeviceProfile = CARD) -> float:
    work = Work()
    work.op(name, dtype, flops, moved)
    (found,) = op_seconds(work.trace(), card)
    return float(found)


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("aten.mm.default", "float32", "fp32"),
        ("aten.mm.default", "bfloat16", "bf16"),
        ("aten.mm.default", "float16", "fp16"),
        ("aten.convolution.default", "float32", "tf32"),
        ("aten.convolution_backward.default", "float32", "tf32"),
        ("aten.convolution.default", "bfloat16", "bf16"),
        ("aten.mm.default", "complex64", "fp32"),
    ],
)
def test_arithmetic_runs_at_the_rate_of_its_dtype(name: str, dtype: str, rate: str) -> None:
    expected = FAST / (CARD.peak_flops[rate] * COMPUTE_EFFICIENCY)
    assert seconds(name, dtype, FAST, 1) == pytest.approx(expected)


def test_a_card_without_a_path_for_a_dtype_takes_the_next() -> None:
    card = find_profile("v100-16gb")
    assert "bf16" not in card.peak_flops and "tf32" not in card.peak_flops
    assert seconds("aten.mm.default", "bfloat16", FAST, 1, card) == pytest.approx(
        FAST / (card.peak_flops["fp16"] * COMPUTE_EFFICIENCY)
    )
    assert seconds("aten.convolution.default", "float32", FAST, 1, card) == pytest.approx(
        FAST / (card.peak_flops["fp32"] * COMPUTE_EFFICIENCY)
    )


def test_traffic_counts_where_it_takes_longer() -> None:
    expected = SLOW / (CARD.memory_bandwidth_bytes_per_second * BANDWIDTH_EFFICIENCY)
    assert seconds("aten.add.Tensor", "float32", 0, SLOW) == pytest.approx(expected)
    assert seconds("aten.mm.default", "bfloat16", 1000, SLOW) == pytest.approx(expected)


def test_views_cost_nothing_and_every_kernel_something() -> None:
    assert seconds("aten.view.default", "float32", 0, 0) == 0.0
    assert seconds("aten.add.Tensor", "float32", 0, 4) == SHORTEST_KERNEL_SECONDS


def test_unknown_traffic_is_that_of_whole_storages() -> None:
    expected = 2 * (1 << 30) / (CARD.memory_bandwidth_bytes_per_second * BANDWIDTH_EFFICIENCY)
    assert seconds("aten._cudnn_rnn.default", "float32", 0, -1) == pytest.approx(expected)


def test_rows_are_priced_one_by_one() -> None:
    work = Work()
    for size in (SLOW, 0, 2 * SLOW):
        work.op("aten.add.Tensor", "float32", 0, size)
    trace = work.trace()
    everything = op_seconds(trace, CARD)
    assert everything[1] == 0.0 and everything[2] == pytest.approx(2 * everything[0])
    assert np.array_equal(op_seconds(trace, CARD, 1, 3), everything[1:])
    assert storage_bytes(trace).tolist() == [1 << 30] * 6


def test_a_faster_card_is_faster() -> None:
    twice = msgspec.structs.replace(
        CARD, memory_bandwidth_bytes_per_second=2 * CARD.memory_bandwidth_bytes_per_second
    )
    assert seconds("aten.add.Tensor", "float32", 0, SLOW, twice) == pytest.approx(
        seconds("aten.add.Tensor", "float32", 0, SLOW) / 2
    )


def test_operators_that_read_nothing_have_a_price() -> None:
    builder = TraceBuilder()
    builder.begin_op("aten.zeros.default")
    builder.op_work(flops=0, moved_bytes=SLOW)
    assert op_seconds(builder.build(TraceMeta()), CARD)[0] > SHORTEST_KERNEL_SECONDS
