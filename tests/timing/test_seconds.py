"""Seconds of operators: rates, traffic, launches, and traces that say little."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from memplan.timing.seconds import op_seconds
from memplan.timing.table import kernel_times
from memplan.timing.workload import storage_bytes
from memplan.types.builder import TraceBuilder
from memplan.types.device import DeviceProfile, find_profile
from memplan.types.trace import EventKind, Trace, TraceMeta

CARD = find_profile("a100-80gb")
FAST, SLOW = 10**13, 10**10
TABLE = kernel_times()
LAUNCH = TABLE.launch_us * 1e-6


class Work:
    """Builds operators that read one storage of a dtype and write another."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()

    def op(
        self, name: str, dtype: str, flops: int, moved: int, text: str = "", nbytes: int = 1 << 30
    ) -> None:
        builder = self.builder
        source, target = (builder.new_storage(dtype=dtype) for _ in range(2))
        builder.append(EventKind.ALLOC, source, nbytes)
        builder.begin_op(name, reads=[source])
        builder.op_work(flops=flops, moved_bytes=moved, operands=text)
        builder.op_writes([target])
        builder.append(EventKind.ALLOC, target, nbytes)

    def trace(self) -> Trace:
        return self.builder.build(TraceMeta())


def seconds(
    name: str, dtype: str, flops: int, moved: int, text: str = "", card: DeviceProfile = CARD
) -> float:
    work = Work()
    work.op(name, dtype, flops, moved, text)
    (found,) = op_seconds(work.trace(), card)
    return float(found)


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("aten.mm.default", "float32", "fp32"),
        ("aten.mm.default", "tf32", "tf32"),
        ("aten.mm.default", "bfloat16", "bf16"),
        ("aten.mm.default", "float16", "fp16"),
        ("aten.mm.default", "complex64", "fp32"),
    ],
)
def test_arithmetic_runs_at_the_rate_of_its_dtype(name: str, dtype: str, rate: str) -> None:
    reached = TABLE.of("matmul").compute * TABLE.tensor_factor(CARD)
    expected = FAST / (CARD.peak_flops[rate] * reached) + LAUNCH
    assert seconds(name, dtype, FAST, 0) == pytest.approx(expected)


@pytest.mark.parametrize("rate", ["tf32", "fp32"])
def test_convolutions_in_float32_run_at_the_rate_that_the_script_allows(rate: str) -> None:
    ratio = CARD.peak_flops["bf16"] / CARD.peak_flops[rate]
    dtype = {"tf32": "tf32", "fp32": "float32"}[rate]
    rest = "16x8x3x3:{0}:c - [1,1] [0,0] [1,1] False [0,0] 1"
    text = f"8x8x16x16:{{0}}:n {rest}"
    slow, fast = (
        seconds("aten.convolution.default", one, FAST, 0, text.format(one)) - LAUNCH
        for one in (dtype, "bfloat16")
    )
    assert slow == pytest.approx(ratio * fast, rel=0.01)


def test_rates_that_a_card_does_not_have_are_those_below() -> None:
    card = find_profile("v100-16gb")
    assert seconds("aten.mm.default", "bfloat16", FAST, 0, card=card) == pytest.approx(
        seconds("aten.mm.default", "float16", FAST, 0, card=card)
    )


def test_traffic_bounds_what_has_little_arithmetic() -> None:
    memory = TABLE.of("pointwise").memory
    expected = SLOW / (CARD.memory_bandwidth_bytes_per_second * memory) + LAUNCH
    text = "1024:float32:c 1024:float32:c"
    assert seconds("aten.add.Tensor", "float32", 0, SLOW, text) == pytest.approx(expected)


def test_what_stays_in_the_l2_cache_is_faster() -> None:
    small, large = CARD.l2_bytes // 2, 2 * CARD.l2_bytes
    inside = seconds("aten.add.Tensor", "float32", 0, small) - LAUNCH
    outside = seconds("aten.add.Tensor", "float32", 0, large) - LAUNCH
    assert outside / inside == pytest.approx(4 * TABLE.l2_gain)


def test_views_cost_nothing_and_every_kernel_something() -> None:
    assert seconds("aten.view.default", "float32", 0, 0) == 0.0
    assert seconds("aten.add.Tensor", "float32", 0, 4) > LAUNCH


def test_unknown_traffic_is_that_of_whole_storages() -> None:
    assert seconds("aten._cudnn_rnn.default", "float32", 0, -1) == pytest.approx(
        seconds("aten._cudnn_rnn.default", "float32", 0, 2 << 30)
    )


def test_rows_are_priced_one_by_one() -> None:
    work = Work()
    for size in (SLOW, 0, 2 * SLOW):
        work.op("aten.add.Tensor", "float32", 0, size)
    trace = work.trace()
    everything = op_seconds(trace, CARD)
    assert everything[1] == 0.0
    assert everything[2] - LAUNCH == pytest.approx(2 * (everything[0] - LAUNCH))
    assert np.array_equal(op_seconds(trace, CARD, 1, 3), everything[1:])
    assert storage_bytes(trace).tolist() == [1 << 30] * 6


def test_a_faster_card_is_faster() -> None:
    twice = msgspec.structs.replace(
        CARD, memory_bandwidth_bytes_per_second=2 * CARD.memory_bandwidth_bytes_per_second
    )
    add = ("aten.add.Tensor", "float32", 0, SLOW, "")
    assert seconds(*add, twice) - LAUNCH == pytest.approx((seconds(*add) - LAUNCH) / 2)


def test_operators_that_read_nothing_have_a_price() -> None:
    builder = TraceBuilder()
    builder.begin_op("aten.zeros.default")
    builder.op_work(flops=0, moved_bytes=SLOW)
    assert op_seconds(builder.build(TraceMeta()), CARD)[0] > LAUNCH
