"""The native replay against the plain model, on random streams of events."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.simulate.oracle import simulate_slowly
from memplan.simulate.settings import MIB, UNLIMITED, AllocatorSettings
from memplan.simulate.simulator import simulate
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Trace, TraceMeta

EXAMPLES = int(os.environ.get("MEMPLAN_EXAMPLES", "150"))

sizes = st.one_of(
    st.integers(0, 4096),
    st.sampled_from([511, 512, 513, 300_000, MIB - 512, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7]),
    st.integers(1, 30 * MIB),
    st.sampled_from([10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB, 40 * MIB, 62 * MIB]),
)
streams = st.integers(0, 2)
steps = st.one_of(
    st.tuples(st.just("alloc"), sizes, streams),
    st.tuples(st.just("alloc"), sizes, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 10**6), st.booleans()),
    st.tuples(st.just("free"), st.integers(0, 10**6), st.just(False)),
    st.tuples(st.just("use"), st.integers(0, 10**6), streams),
    st.tuples(st.just("complete"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 3), streams),
    st.tuples(st.just("wait"), st.integers(0, 3), streams),
    st.tuples(st.just("sync"), st.just(0), st.integers(-1, 2)),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
)


@st.composite
def allocator_settings(draw: st.DrawFn) -> AllocatorSettings:
    large = draw(st.sampled_from([20 * MIB, 20 * MIB, 12 * MIB, 32 * MIB]))
    limit = draw(st.sampled_from([UNLIMITED, UNLIMITED, large, 40 * MIB]))
    return AllocatorSettings(
        expandable_segments=draw(st.booleans()),
        large_segment_size=large,
        max_split_size=max(limit, large),
        max_non_split_rounding=draw(st.sampled_from([large, 2 * large])),
        garbage_collection_threshold=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9])),
        roundup_power2_divisions=tuple(
            draw(st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=16, max_size=16))
        ),
        per_process_memory_fraction=draw(st.sampled_from([1.0, 0.9, 0.5])),
        throw_on_cudamalloc_oom=draw(st.sampled_from([False, False, True])),
    )


def build(program: list[tuple[str, int, int]]) -> Trace:
    """A trace in which every free is of something alive, unless nothing is."""
    builder = TraceBuilder()
    alive: list[int] = []
    freed: list[int] = []
    for action, value, extra in program:
        if action == "alloc":
            storage = builder.new_storage()
            alive.append(storage)
            builder.append(EventKind.ALLOC, storage, value, stream=extra)
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
        elif action == "record":
            builder.append(EventKind.EVENT_RECORD, stream=extra, aux=value)
        elif action == "wait":
            builder.append(EventKind.EVENT_WAIT, stream=extra, aux=value)
        elif action == "sync":
            builder.append(EventKind.SYNCHRONIZE, stream=extra)
        elif action == "empty":
            builder.append(EventKind.EMPTY_CACHE)
    return builder.build(TraceMeta())


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    program=st.lists(steps, min_size=1, max_size=80),
    conf=allocator_settings(),
    capacity=st.sampled_from([None, 24 * MIB, 66 * MIB, 130 * MIB, 256 * MIB]),
    spare=st.sampled_from([0, 10 * MIB]),
    reuse=st.sampled_from(["earliest", "latest"]),
)
def test_native_replay_agrees_with_the_plain_model(
    program: list[tuple[str, int, int]],
    conf: AllocatorSettings,
    capacity: int | None,
    spare: int,
    reuse: str,
) -> None:
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


def agree(trace: Trace, conf: AllocatorSettings) -> None:
    fast, slow = simulate(trace, conf), simulate_slowly(trace, conf)
    for column in ("address", "requested", "allocated", "active", "reserved"):
        np.testing.assert_array_equal(getattr(fast, column), getattr(slow, column), column)


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
    agree(build(program), AllocatorSettings(expandable_segments=expandable))
