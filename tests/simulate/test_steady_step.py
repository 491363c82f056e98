"""What a captured step allocates when it is repeated."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from memplan.simulate import simulate
from memplan.simulate.steady_step import steady_peak, warmed
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Phase, Role, Trace, TraceMeta

MIB = 1 << 20


class Step:
    """Writes a step: weights, then forward and backward."""

    def __init__(self, conf: str = "") -> None:
        self.builder = TraceBuilder()
        self._conf = conf
        self.builder.phase = Phase.SETUP
        self.weights = self.alloc(30 * MIB)
        self.builder.phase = Phase.FORWARD

    def alloc(self, nbytes: int, role: Role = Role.UNKNOWN) -> int:
        self.builder.begin_op("aten::mm")
        storage = self.builder.new_storage(role=role)
        self.builder.append(EventKind.ALLOC, storage, nbytes)
        return storage

    def free(self, storage: int) -> None:
        self.builder.append(EventKind.FREE, storage, 0)

    def trace(self) -> Trace:
        return warmed(self.builder.build(TraceMeta(alloc_conf=self._conf)))


def two_blocks(conf: str = "") -> Step:
    """The second of two requests is a little smaller than the block that the first one leaves."""
    step = Step(conf)
    step.free(step.alloc(12 * MIB))
    step.free(step.alloc(12 * MIB - 300_000))
    last = step.alloc(12 * MIB - 300_000)
    step.alloc(64 * MIB)
    step.free(last)
    return step


def test_a_block_that_is_not_split_counts_whole() -> None:
    assert steady_peak(two_blocks().trace()) >= 30 * MIB + 12 * MIB + 64 * MIB


def test_with_expandable_segments_every_block_is_split() -> None:
    peak = steady_peak(two_blocks("expandable_segments:True").trace())
    assert 0 <= peak - (30 + 12 + 64) * MIB + 300_000 < 512


def test_another_backend_counts_what_was_asked_for() -> None:
    peak = steady_peak(two_blocks("backend:cudaMallocAsync").trace())
    assert peak == (30 + 12 + 64) * MIB - 300_000


def test_a_workspace_that_stays_is_there_from_the_second_step_on() -> None:
    step = Step()
    step.free(step.alloc(40 * MIB))
    step.alloc(32 * MIB, Role.WORKSPACE)
    step.free(step.alloc(8 * MIB))
    trace = step.trace()
    assert simulate(trace).requested_peak_bytes == (30 + 40 + 32) * MIB
    assert trace.ops.event.tolist() == [0, 2, 4, 4]
    assert trace.events.bytes[trace.ops.event].tolist() == [30 * MIB, 40 * MIB, 8 * MIB, 8 * MIB]
    assert steady_peak(trace) >= (30 + 40 + 32) * MIB


def test_gradients_make_room_for_the_next_steps_and_inputs_stay() -> None:
    step = Step()
    step.builder.phase = Phase.SETUP
    inputs = step.alloc(64 * MIB, Role.INPUT)
    step.builder.phase = Phase.FORWARD
    step.free(step.alloc(100 * MIB))
    step.alloc(30 * MIB, Role.GRADIENT)
    step.free(inputs)
    assert steady_peak(step.trace()) == (30 + 64 + 100) * MIB


def test_the_upper_end_of_a_workspace_counts_where_asked() -> None:
    step = Step()
    trace = step.trace()
    high = trace.events.bytes_high + 50 * MIB
    trace = replace(trace, events=replace(trace.events, bytes_high=high))
    assert steady_peak(trace) == 30 * MIB
    assert steady_peak(trace, "high") == 80 * MIB


def test_it_is_no_less_than_a_new_process_allocates() -> None:
    step = Step()
    for number in range(40):
        held = [step.alloc((20 + 7 * n + number % 5) * 300_000) for n in range(number % 4 + 1)]
        for storage in held:
            step.free(storage)
    trace = step.trace()
    meta = msgspec.structs.replace(trace.meta, initial_segments=[])
    fresh = simulate(replace(trace, meta=meta)).allocated_peak_bytes
    assert steady_peak(trace) >= fresh
    assert steady_peak(trace) == steady_peak(trace)
