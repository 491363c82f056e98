"""The allocator's rules, one by one, with figures worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from memplan.simulate import AllocatorSettings, Timeline, simulate
from memplan.simulate.settings import MIB
from memplan.types.builder import TraceBuilder
from memplan.types.errors import FormatError, NoAnswerError, UsageError
from memplan.types.trace import (
    Block,
    EventKind,
    Provenance,
    Role,
    Segment,
    Trace,
    TraceMeta,
)

EXPANDABLE = AllocatorSettings(expandable_segments=True)


class Program:
    """Writes a trace: names stand for storages."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self.storages: dict[str, int] = {}

    def alloc(self, name: str, nbytes: int, *, stream: int = 0) -> Program:
        self.storages[name] = self.builder.new_storage()
        self.builder.append(EventKind.ALLOC, self.storages[name], nbytes, stream=stream)
        return self

    def free(self, *names: str) -> Program:
        for name in names:
            self.builder.append(EventKind.FREE, self.storages[name])
        return self

    def add(self, kind: EventKind, name: str = "", *, stream: int = 0, aux: int = -1) -> Program:
        storage = self.storages[name] if name else -1
        self.builder.append(kind, storage, stream=stream, aux=aux)
        return self

    def trace(self, **meta: object) -> Trace:
        return self.builder.build(TraceMeta(**meta))  # type: ignore[arg-type]


def segment_sizes(timeline: Timeline, kind: EventKind = EventKind.SEGMENT_ALLOC) -> list[int]:
    log = timeline.segment_events
    return [int(size) for size, k in zip(log.bytes, log.kind, strict=True) if k == kind]


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB - 600, 10 * MIB - 512, 20 * MIB),
        (21 * MIB + 5, 22 * MIB, 22 * MIB),  # The tail of less than 1 MiB is not split off.
    ],
)
def test_rounding(nbytes: int, block: int, segment: int) -> None:
    timeline = simulate(Program().alloc("a", nbytes).trace())
    assert timeline.requested_peak_bytes == nbytes
    assert timeline.allocated_peak_bytes == block
    assert segment_sizes(timeline) == [segment]


def test_best_fit_takes_the_smaller_block_and_blocks_merge() -> None:
    program = Program().alloc("a", 12 * MIB).alloc("b", 30 * MIB).free("a", "b")
    program.alloc("c", 11 * MIB).alloc("d", 14 * MIB).alloc("e", 16 * MIB).free("d", "e")
    timeline = simulate(program.alloc("f", 30 * MIB).trace())
    assert segment_sizes(timeline) == [12 * MIB, 30 * MIB]
    a, b, c, d, e, f = timeline.address[timeline.address >= 0].tolist()
    assert (c, d, e, f) == (a, b, b + 14 * MIB, b)


def test_streams_do_not_share_blocks() -> None:
    program = Program().alloc("a", 4096).free("a").alloc("b", 4096, stream=7)
    assert segment_sizes(simulate(program.trace())) == [2 * MIB, 2 * MIB]


def recorded() -> Program:
    return Program().alloc("a", 30 * MIB).add(EventKind.RECORD_STREAM, "a", stream=1).free("a")


def test_recorded_memory_is_awaited_unless_taken_early() -> None:
    trace = recorded().alloc("b", 30 * MIB).trace()
    late, early = simulate(trace), simulate(trace, reuse="earliest")
    assert (late.reserved_peak_bytes, early.reserved_peak_bytes) == (60 * MIB, 30 * MIB)
    assert late.allocated.tolist() == early.allocated.tolist()
    assert late.active.tolist() == [30 * MIB, 30 * MIB, 30 * MIB, 60 * MIB]
    assert early.active.tolist() == [30 * MIB, 30 * MIB, 0, 30 * MIB]


@pytest.mark.parametrize(
    ("wait", "segments"),
    [
        (lambda p: p.add(EventKind.SYNCHRONIZE, stream=-1), 1),
        (lambda p: p.add(EventKind.SYNCHRONIZE, stream=1), 1),
        (lambda p: p.add(EventKind.SYNCHRONIZE, stream=0), 2),
        (lambda p: p.add(EventKind.EVENT_RECORD, stream=1, aux=9)
            .add(EventKind.EVENT_WAIT, stream=0, aux=9)
            .add(EventKind.SYNCHRONIZE, stream=0), 1),
        (lambda p: p.add(EventKind.EVENT_RECORD, stream=1, aux=9)
            .add(EventKind.SYNCHRONIZE, stream=0)
            .add(EventKind.EVENT_WAIT, stream=0, aux=9), 2),
    ],
)  # fmt: skip
def test_what_the_host_waits_for_ends_the_wait(
    wait: Callable[[Program], Program], segments: int
) -> None:
    program = wait(recorded()).alloc("b", 30 * MIB)
    assert len(segment_sizes(simulate(program.trace()))) == segments


def test_an_observed_completion_decides_when_memory_returns() -> None:
    program = Program().alloc("a", 30 * MIB).free("a").alloc("b", 30 * MIB)
    program.add(EventKind.FREE_COMPLETED, "a").alloc("c", 30 * MIB)
    timeline = simulate(program.trace(), reuse="earliest")
    assert segment_sizes(timeline) == [30 * MIB, 30 * MIB]
    assert timeline.active.tolist() == [30 * MIB, 30 * MIB, 60 * MIB, 30 * MIB, 60 * MIB]
    assert timeline.allocated.tolist() == [30 * MIB, 0, 30 * MIB, 30 * MIB, 60 * MIB]


def test_empty_cache_gives_back_whole_segments_only() -> None:
    program = Program().alloc("a", 4096).alloc("b", 30 * MIB).alloc("c", 40 * MIB)
    program.free("b").add(EventKind.EMPTY_CACHE).free("a", "c").add(EventKind.EMPTY_CACHE)
    timeline = simulate(program.trace())
    assert timeline.reserved.tolist()[4:] == [42 * MIB, 42 * MIB, 42 * MIB, 0]
    assert sorted(timeline.segments.freed_event.tolist()) == [4, 7, 7]


def test_a_full_device_gives_back_the_cache_and_retries() -> None:
    program = Program().alloc("a", 30 * MIB).free("a").alloc("b", 40 * MIB)
    timeline = simulate(program.trace(), capacity_bytes=64 * MIB)
    assert (timeline.num_alloc_retries, timeline.num_ooms, timeline.fits) == (1, 0, True)
    assert timeline.reserved_peak_bytes == 40 * MIB


def test_out_of_memory_is_named_and_the_need_is_still_found() -> None:
    program = Program().alloc("a", 30 * MIB).alloc("b", 40 * MIB).alloc("c", 50 * MIB)
    timeline = simulate(program.trace(), capacity_bytes=64 * MIB)
    assert (timeline.oom_event, timeline.oom_bytes, timeline.num_ooms) == (1, 40 * MIB, 1)
    assert timeline.fits is False
    assert timeline.reserved_peak_bytes == 120 * MIB
    assert simulate(program.trace()).fits is None


def test_memory_fraction_limits_and_may_refuse_at_once() -> None:
    trace = Program().alloc("a", 30 * MIB).free("a").alloc("b", 40 * MIB).trace()
    half = AllocatorSettings(per_process_memory_fraction=0.5)
    timeline = simulate(trace, half, capacity_bytes=90 * MIB, device_bytes=100 * MIB)
    assert (timeline.num_alloc_retries, timeline.oom_event) == (1, None)
    strict = dataclasses.replace(half, throw_on_cudamalloc_oom=True)
    assert simulate(trace, strict, capacity_bytes=100 * MIB).oom_event == 2
    with pytest.raises(NoAnswerError, match="per_process_memory_fraction"):
        simulate(trace, half)


def test_garbage_collection_spares_the_capacity_without_a_retry() -> None:
    program = Program().alloc("a", 30 * MIB).free("a").alloc("b", 40 * MIB)
    conf = AllocatorSettings(per_process_memory_fraction=0.5, garbage_collection_threshold=0.5)
    timeline = simulate(program.trace(), conf, capacity_bytes=100 * MIB)
    assert timeline.num_alloc_retries == 0
    assert timeline.reserved_peak_bytes == 40 * MIB


def test_oversize_blocks_are_neither_split_nor_lent() -> None:
    program = Program().alloc("a", 60 * MIB).free("a").alloc("b", 12 * MIB).alloc("c", 58 * MIB)
    timeline = simulate(program.trace(), AllocatorSettings(max_split_size=40 * MIB))
    assert segment_sizes(timeline) == [60 * MIB, 12 * MIB]
    assert timeline.allocated_peak_bytes == 72 * MIB


def test_expandable_segment_grows_by_pages_and_keeps_its_place() -> None:
    program = Program().alloc("a", 30 * MIB).alloc("b", 25 * MIB).free("a").alloc("c", 50 * MIB)
    timeline = simulate(program.free("b", "c").add(EventKind.EMPTY_CACHE).trace(), EXPANDABLE)
    assert segment_sizes(timeline, EventKind.SEGMENT_MAP) == [40 * MIB, 20 * MIB, 60 * MIB]
    a, b, c = timeline.address[timeline.address >= 0].tolist()
    assert (b, c) == (a + 30 * MIB, a + 55 * MIB)
    assert timeline.reserved.tolist()[-1] == 0


def test_expandable_segment_unmaps_pages_between_blocks() -> None:
    program = Program().alloc("a", 10 * MIB).alloc("b", 50 * MIB).alloc("c", 10 * MIB)
    timeline = simulate(program.free("b").add(EventKind.EMPTY_CACHE).trace(), EXPANDABLE)
    assert timeline.reserved.tolist()[-2:] == [80 * MIB, 40 * MIB]
    held = timeline.segments.freed_event < 0
    assert timeline.segments.bytes[held].sum() == 40 * MIB
    assert timeline.segments.bytes[~held].tolist() == [40 * MIB]


def test_zero_bytes_take_nothing_and_events_of_other_devices_do_not_count() -> None:
    program = Program().alloc("a", 0).free("a")
    other = program.builder.new_storage()
    program.builder.append(EventKind.ALLOC, other, 5 * MIB, device=1)
    trace = program.trace()
    assert simulate(trace).reserved_peak_bytes == 0
    assert simulate(trace).unknown_frees == 0
    assert simulate(trace, device=1).reserved_peak_bytes == 20 * MIB


def test_bounds_choose_the_column() -> None:
    builder = TraceBuilder()
    builder.append(EventKind.ALLOC, builder.new_storage(), 4096, low=512, high=8192)
    trace = builder.build(TraceMeta())
    peaks = [simulate(trace, bounds=b).allocated_peak_bytes for b in ("low", "expected", "high")]
    assert peaks == [512, 4096, 8192]


def test_settings_of_the_trace_are_the_default() -> None:
    trace = Program().alloc("a", 30 * MIB).trace(alloc_conf="expandable_segments:True")
    assert simulate(trace).reserved_peak_bytes == 40 * MIB


def test_live_storages_and_peaks() -> None:
    timeline = simulate(Program().alloc("a", 512).alloc("b", 1024).free("a").trace())
    assert [timeline.live_at(i).tolist() for i in (-1, 0, 1, 2)] == [[], [0], [0, 1], [1]]
    assert timeline.allocated_peak_event == 1


def start(expandable: bool = False) -> Segment:
    base = 1 << 40
    blocks = [Block(base, 8 * MIB, 8 * MIB, 0), Block(base + 30 * MIB, 10 * MIB, 9 * MIB, -2)]
    return Segment(base, 40 * MIB, 0, 0, blocks, expandable)


@pytest.mark.parametrize("expandable", [False, True])
def test_initial_segments_are_used_and_their_storages_end(expandable: bool) -> None:
    builder = TraceBuilder()
    resident, new = builder.new_storage(), builder.new_storage()
    builder.append(EventKind.FREE, resident)
    builder.append(EventKind.ALLOC, new, 30 * MIB)
    trace = builder.build(TraceMeta(initial_segments=[start(expandable)]))
    conf = AllocatorSettings(expandable_segments=expandable)
    timeline = simulate(trace, conf)
    assert timeline.start_reserved_bytes == 40 * MIB
    assert (timeline.start_allocated_bytes, timeline.start_requested_bytes) == (18 * MIB, 17 * MIB)
    assert timeline.address.tolist() == [-1, 1 << 40]
    assert timeline.reserved_peak_bytes == 40 * MIB
    assert timeline.live_at(-1).tolist() == [0]


def test_an_initial_expandable_segment_goes_on_growing() -> None:
    builder = TraceBuilder()
    builder.new_storage()
    builder.append(EventKind.ALLOC, builder.new_storage(), 30 * MIB)
    trace = builder.build(TraceMeta(initial_segments=[start(expandable=True)]))
    timeline = simulate(trace, EXPANDABLE)
    assert timeline.address.tolist() == [(1 << 40) + 40 * MIB]
    assert timeline.reserved.tolist() == [80 * MIB]


def test_what_cannot_be_is_refused() -> None:
    builder = TraceBuilder()
    storage = builder.new_storage()
    for _ in range(2):
        builder.append(EventKind.ALLOC, storage, 4)
    with pytest.raises(FormatError, match="event 1: a storage generation that begins twice"):
        simulate(builder.build(TraceMeta()))
    overlapping = [start(), shifted(start(), 2 * MIB)]
    trace = Program().alloc("a", 1).trace(initial_segments=overlapping)
    with pytest.raises(FormatError, match="overlap"):
        simulate(trace)
    for nbytes in (-1, 1 << 60):
        with pytest.raises(FormatError, match="impossible size"):
            simulate(Program().alloc("a", nbytes).trace())
    beyond = Program().add(EventKind.FREE).trace()
    beyond.events.storage[0] = 5
    with pytest.raises(FormatError, match="out of range"):
        simulate(beyond)
    with pytest.raises(UsageError):
        simulate(Program().trace(), bounds="middle")
    with pytest.raises(NoAnswerError, match="cudaMallocAsync"):
        simulate(Program().trace(), AllocatorSettings(backend="cudaMallocAsync"))


def shifted(segment: Segment, by: int) -> Segment:
    return Segment(segment.address + by, segment.bytes, 0, 0, [])


def test_an_empty_trace() -> None:
    timeline = simulate(Program().trace())
    assert timeline.reserved_peak_bytes == 0
    assert len(timeline.segments) == 0


def test_the_trace_is_left_alone() -> None:
    trace = Program().alloc("a", 30 * MIB).free("a").trace()
    before = {name: column.copy() for name, column in vars(trace.events).items()}
    simulate(trace)
    for name, column in before.items():
        np.testing.assert_array_equal(getattr(trace.events, name), column)


@pytest.mark.parametrize(("role", "granted"), [(Role.WORKSPACE, True), (Role.UNKNOWN, False)])
def test_only_a_workspace_makes_do_with_less(role: Role, granted: bool) -> None:
    """An RNN's reserve is as uncertain, but its kernel has no plan with a smaller one."""
    builder = TraceBuilder()
    storage = builder.new_storage(role=role)
    rule = {"low": 4 * MIB, "high": 80 * MIB, "provenance": Provenance.RULE}
    builder.append(EventKind.ALLOC, storage, 60 * MIB, **rule)  # type: ignore[arg-type]
    timeline = simulate(builder.build(TraceMeta()), AllocatorSettings(), capacity_bytes=40 * MIB)
    assert (timeline.oom_event is None) == granted
