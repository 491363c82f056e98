"""The native replay against the plain model, on random streams of events."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.simulate.settings import MIB, UNLIMITED, AllocatorSettings
from memplan.simulate.simulator import simulate
from memplan.simulate.timeline import Timeline
from memplan.types.builder import TraceBuilder
from memplan.types.trace import (
    OUTSIDE,
    PRIVATE_POOLS,
    EventKind,
    Provenance,
    Role,
    Trace,
    TraceMeta,
)
from tests.oracles.allocator.replay import simulate_slowly

EXAMPLES = int(os.environ.get("MEMPLAN_EXAMPLES", "60"))

any_size = st.one_of(
    st.integers(0, 4096),
    st.sampled_from([511, 512, 513, 300_000, MIB - 512, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7]),
    st.integers(1, 30 * MIB),
    st.sampled_from([10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB, 40 * MIB, 62 * MIB]),
)
large_size = st.integers(6, 60).map(lambda count: count * MIB + 512)
number = st.integers(0, 10**6)


def steps(
    weights: dict[str, int], sizes: st.SearchStrategy[int], streams: int
) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Programs of (action, value, extra), in which actions are as frequent as their weights."""
    stream = st.integers(0, streams - 1)
    kinds = {
        "alloc": st.tuples(st.just("alloc"), sizes, stream),
        "free": st.tuples(st.just("free"), number, st.integers(0, 3).map(lambda n: n == 0)),
        "use": st.tuples(st.just("use"), number, stream),
        "complete": st.tuples(st.just("complete"), number, st.just(0)),
        "record": st.tuples(st.just("record"), st.integers(0, 1), stream),
        "wait": st.tuples(st.just("wait"), st.integers(0, 1), stream),
        "sync": st.tuples(st.just("sync"), st.just(0), st.integers(-1, streams - 1)),
        "lend": st.tuples(st.just("lend"), number, stream),
        "hand over": st.tuples(st.just("hand over"), stream, stream),
        "empty": st.tuples(st.just("empty"), st.just(0), st.just(0)),
    }
    table = [kind for kind, weight in weights.items() for _ in range(weight)]
    return st.lists(st.sampled_from(table).flatmap(kinds.__getitem__), min_size=1, max_size=80)


Program = list[tuple[str, int, int]]


def in_place(pool: int) -> Callable[[Program], Program]:
    """The same program with the last of three streams in a private pool, or outside."""
    return partial(_placed, pool)


def _placed(pool: int, program: Program) -> Program:
    placed = {"alloc", "use", "record", "wait", "sync", "lend", "hand over"}
    return [
        (action, value, pool if action in placed and extra == 2 else extra)
        for action, value, extra in program
    ]


PROGRAMS = {
    "mixed": steps(
        {"alloc": 6, "free": 5, "use": 2, "complete": 1, "record": 1, "wait": 1, "sync": 1,
         "empty": 1}, any_size, 3,
    ),
    "private pools": steps(
        {"alloc": 9, "free": 7, "use": 1, "sync": 1, "empty": 2}, any_size, 3
    ).map(in_place(PRIVATE_POOLS + 3)),
    "memory of others": steps(
        {"alloc": 9, "free": 7, "use": 1, "sync": 1, "empty": 2}, any_size, 3
    ).map(in_place(OUTSIDE + 3)),
    "full device": steps({"alloc": 10, "free": 9}, large_size, 1),
    "gaps in expandable segments": steps({"alloc": 10, "free": 9, "empty": 3}, large_size, 1),
    "streams that wait": steps(
        {"alloc": 6, "lend": 6, "record": 1, "wait": 1, "hand over": 4, "sync": 2}, any_size, 3
    ),
}  # fmt: skip


@st.composite
def allocator_settings(draw: st.DrawFn, kind: str) -> AllocatorSettings:
    large = draw(st.sampled_from([20 * MIB, 20 * MIB, 12 * MIB, 32 * MIB]))
    limit = draw(st.sampled_from([UNLIMITED, UNLIMITED, large, 40 * MIB]))
    expandable = draw(st.booleans())
    if kind == "full device":
        limit, expandable = draw(st.sampled_from([large, 30 * MIB])), False
    return AllocatorSettings(
        expandable_segments=expandable or kind == "gaps in expandable segments",
        large_segment_size=large,
        max_split_size=max(limit, large),
        max_non_split_rounding=draw(st.sampled_from([large, 2 * large])),
        garbage_collection_threshold=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9])),
        roundup_power2_divisions=tuple(
            draw(st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=16, max_size=16))
            if kind == "mixed"
            else [0] * 16
        ),
        per_process_memory_fraction=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5])),
        throw_on_cudamalloc_oom=draw(st.sampled_from([False, False, False, True])),
    )


def build(program: list[tuple[str, int, int]]) -> Trace:
    """A trace in which every free is of something alive, unless nothing is."""
    builder = TraceBuilder()
    alive: list[int] = []
    freed: list[int] = []
    for action, value, extra in program:
        if action == "alloc":
            derived = value % 3 == 0
            # A workspace may do with less; another size by a rule is only uncertain.
            role = Role.WORKSPACE if derived and value % 9 else Role.UNKNOWN
            storage = builder.new_storage(role=role)
            alive.append(storage)
            builder.append(
                EventKind.ALLOC,
                storage,
                value,
                low=value // 4 * (value % 2) if derived else None,
                stream=extra,
                provenance=Provenance.RULE if derived else Provenance.OBSERVED,
            )
        elif action == "free" and alive:
            storage = alive.pop(value % len(alive))
            builder.append(EventKind.FREE, storage)
            if extra:
                freed.append(storage)
        elif action == "complete" and freed:
            builder.append(EventKind.FREE_COMPLETED, freed.pop(value % len(freed)))
        elif action == "use" and alive:
            storage = alive[value % len(alive)]
            builder.append(EventKind.RECORD_STREAM, storage, stream=extra)
        elif action == "lend" and alive:
            storage = alive.pop(value % len(alive))
            builder.append(EventKind.RECORD_STREAM, storage, stream=extra)
            builder.append(EventKind.FREE, storage)
        elif action == "hand over":
            builder.append(EventKind.EVENT_RECORD, stream=value, aux=7)
            builder.append(EventKind.EVENT_WAIT, stream=extra, aux=7)
        elif action == "record":
            builder.append(EventKind.EVENT_RECORD, stream=extra, aux=value)
        elif action == "wait":
            builder.append(EventKind.EVENT_WAIT, stream=extra, aux=value)
        elif action == "sync":
            builder.append(EventKind.SYNCHRONIZE, stream=extra)
        elif action == "empty":
            builder.append(EventKind.EMPTY_CACHE)
    return builder.build(TraceMeta())


@pytest.mark.parametrize("kind", list(PROGRAMS))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_native_replay_agrees_with_the_plain_model(kind: str, data: st.DataObject) -> None:
    program = data.draw(PROGRAMS[kind])
    conf = data.draw(allocator_settings(kind))
    capacity = data.draw(st.sampled_from([None, 66 * MIB, 130 * MIB, 256 * MIB]))
    spare = data.draw(st.sampled_from([0, 10 * MIB]))
    reuse = data.draw(st.sampled_from(["latest", "latest", "earliest"]))
    trace = build(program)
    total = (capacity or 200 * MIB) + spare
    fast = simulate(trace, conf, capacity_bytes=capacity, device_bytes=total, reuse=reuse)
    slow = simulate_slowly(trace, conf, capacity_bytes=capacity, device_bytes=total, reuse=reuse)
    log = fast.segment_events
    rows = zip(log.event, log.kind, log.bytes, log.stream, log.address, strict=True)
    assert [tuple(map(int, row)) for row in rows] == slow.segment_events
    for column in ("address", "requested", "allocated", "active", "reserved"):
        np.testing.assert_array_equal(getattr(fast, column), getattr(slow, column), column)
    assert fast.num_alloc_retries == slow.num_alloc_retries
    assert (fast.oom_event, fast.oom_bytes) == (slow.oom_event, slow.oom_bytes)


def agree(trace: Trace, conf: AllocatorSettings) -> Timeline:
    fast, slow = simulate(trace, conf), simulate_slowly(trace, conf)
    for column in ("address", "requested", "allocated", "active", "reserved"):
        np.testing.assert_array_equal(getattr(fast, column), getattr(slow, column), column)
    return fast


@pytest.mark.parametrize("expandable", [False, True])
def test_they_agree_with_hundreds_of_cached_blocks(expandable: bool) -> None:
    rng = random.Random(3)
    program: list[tuple[str, int, int]] = []
    for _ in range(500):
        program.append(("alloc", rng.randrange(1, 400) * 512, 0))
    for _ in range(300):  # Mostly apart, so that few of them merge.
        program.append(("free", rng.randrange(10**6), 0))
    for _ in range(200):
        program.append(("alloc", rng.randrange(1, 400) * 512, 0))
        program.append(("free", rng.randrange(10**6), 0))
    found = agree(build(program), AllocatorSettings(expandable_segments=expandable))
    assert (found.reserved > found.allocated).any(), "blocks are cached"


def test_they_agree_when_expandable_segments_have_used_all_addresses() -> None:
    """Each reserves 1 TiB, and there are 64 TiB to begin with."""
    program = [("alloc", 20 * MIB, 0), ("alloc", 20 * MIB, 1)]
    program += [("free", 1, 0), ("empty", 0, 0), ("alloc", 20 * MIB, 1)] * 100
    trace = build(program)
    agree(trace, AllocatorSettings(expandable_segments=True))
    address = simulate(trace, AllocatorSettings(expandable_segments=True)).address
    assert (address[trace.events.kind == EventKind.ALLOC] > 0).all()


def test_memory_of_others_goes_back_at_once_and_nothing_makes_room_for_it() -> None:
    builder = TraceBuilder()
    cached = builder.new_storage()
    builder.append(EventKind.ALLOC, cached, 40 * MIB)
    builder.append(EventKind.FREE, cached, 40 * MIB)
    first, second = builder.new_storage(), builder.new_storage()
    builder.append(EventKind.ALLOC, first, 29 * MIB + 1, stream=OUTSIDE)
    builder.append(EventKind.FREE, first, 29 * MIB + 1, stream=OUTSIDE)
    builder.append(EventKind.ALLOC, second, 61 * MIB, stream=OUTSIDE)
    trace = builder.build(TraceMeta())
    found = simulate(trace, AllocatorSettings())
    assert found.reserved.tolist() == [n * MIB for n in (40, 40, 70, 40, 102)]
    assert found.outside.tolist() == [n * MIB for n in (0, 0, 30, 0, 62)]
    assert (found.own_reserved_peak_bytes, found.own_allocated_peak_bytes) == (40 * MIB, 40 * MIB)
    tight = simulate(trace, AllocatorSettings(), capacity_bytes=100 * MIB)
    assert tight.oom_event == 4, "the 40 MiB that are cached are not given back for it"
    part = AllocatorSettings(per_process_memory_fraction=0.5)
    assert simulate(trace, part, device_bytes=90 * MIB).oom_event is None, "it is not the process's"


def test_a_private_pool_keeps_what_is_freed_in_it() -> None:
    builder = TraceBuilder()
    for stream in (0, PRIVATE_POOLS + 1):
        storage = builder.new_storage()
        builder.append(EventKind.ALLOC, storage, 30 * MIB, stream=stream)
        builder.append(EventKind.FREE, storage, 30 * MIB, stream=stream)
    builder.append(EventKind.EMPTY_CACHE)
    again = builder.new_storage()
    builder.append(EventKind.ALLOC, again, 25 * MIB, stream=PRIVATE_POOLS + 1)
    other = builder.new_storage()
    builder.append(EventKind.ALLOC, other, 25 * MIB)
    trace = builder.build(TraceMeta())
    for expandable, sizes in ((False, (30, 30, 56)), (True, (40, 40, 80))):
        found = AllocatorSettings(expandable_segments=expandable)
        reserved = simulate(trace, found).reserved[-3:].tolist()
        assert reserved == [size * MIB for size in sizes]
        assert reserved == simulate_slowly(trace, found).reserved[-3:]
