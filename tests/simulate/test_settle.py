"""Steady steps repeated until the allocator settles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.simulate import AllocatorSettings, settled, simulate
from memplan.simulate.repeat import find_round, repeated
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Trace, TraceMeta

MIB = 1 << 20
PLAIN = AllocatorSettings()


class Loop:
    """Writes the steps of a job."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()

    def alloc(self, nbytes: int, at: str = "aten::mm") -> int:
        self.builder.begin_op(at)
        storage = self.builder.new_storage()
        self.builder.append(EventKind.ALLOC, storage, nbytes)
        return storage

    def free(self, storage: int) -> None:
        self.builder.append(EventKind.FREE, storage, 0)

    def build(self, steady: tuple[int, int] | None) -> Trace:
        return self.builder.build(TraceMeta(steady_steps=list(steady or ())))


Step = Callable[[Loop, dict[str, int], int], None]


def job(step: Step, steps: int, steady: tuple[int, int] | None) -> Trace:
    loop, kept = Loop(), {"weights": -1}
    kept["weights"] = loop.alloc(30 * MIB)
    for number in range(steps):
        loop.builder.step = number
        step(loop, kept, number)
        loop.builder.step = number + 1
    return loop.build(steady)


def fragmenting(loop: Loop, kept: dict[str, int], number: int) -> None:
    """The first step puts the optimizer's state into holes that the second could do without, while
    the first one's gradients were elsewhere, and the third cannot."""
    for name in ("gradient 0", "gradient 1"):
        if name in kept:
            loop.free(kept.pop(name))
    activations = [loop.alloc(size * MIB, "aten::mm") for size in (15, 24)]
    for name, size in (("gradient 0", 26), ("gradient 1", 30)):
        kept[name] = loop.alloc(size * MIB, name)
        loop.free(activations.pop())
    if not number:
        kept |= {f"state {size}": loop.alloc(size * MIB, "aten::zeros_like") for size in (14, 20)}
    loop.free(loop.alloc(12 * MIB))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_repetitions_are_what_more_steps_ask_for(data: st.DataObject) -> None:
    """A loop with leftovers of each step, freed at any point of the next: event for event."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 2, 7, 24, 24, 60]), min_size=1, max_size=8))
    order = data.draw(st.permutations(range(len(sizes))))
    leave = data.draw(st.sets(st.sampled_from(range(len(sizes)))))

    def step(loop: Loop, kept: dict[str, int], number: int) -> None:
        made: dict[int, int] = {}
        for turn, size in enumerate(sizes):
            made[turn] = loop.alloc(size * MIB, f"aten::op{turn}")
            if (old := kept.pop(f"left {order[turn]}", None)) is not None:
                loop.free(old)
        if not number:
            kept["state"] = loop.alloc(40 * MIB)
        for turn in order:
            if turn in leave:
                kept[f"left {turn}"] = made[turn]
            else:
                loop.free(made[turn])

    short = job(step, 3, (2, 3))
    of = find_round(short)
    assert of is not None and of.recurs
    longer, captured = repeated(short, of, 5)
    truth = job(step, 8, None)
    for name in ("kind", "bytes", "step", "storage"):
        assert np.array_equal(getattr(longer.events, name), getattr(truth.events, name)), name
    assert np.array_equal(short.events.bytes[captured], longer.events.bytes)
    assert len(longer.storages) == len(truth.storages)


def test_a_step_that_has_yet_to_fragment_is_seen_to() -> None:
    short, long = job(fragmenting, 2, (1, 2)), job(fragmenting, 40, None)
    steady = settled(short, PLAIN)
    peak = simulate(long).reserved_peak_bytes
    assert simulate(short).reserved_peak_bytes < peak
    assert simulate(steady.trace).reserved_peak_bytes == peak
    assert steady.rounds > 0 and not steady.unsettled
    assert steady.captured is not None and len(steady.captured) == len(steady.trace)


def test_a_job_that_has_settled_is_taken_as_it_is() -> None:
    trace = job(lambda loop, _kept, _number: loop.free(loop.alloc(8 * MIB)), 3, (2, 3))
    assert settled(trace, PLAIN).trace is trace
    assert not settled(trace, PLAIN).unsettled


def test_a_trace_made_of_another_is_settled_anew() -> None:
    short = job(fragmenting, 2, (1, 2))
    assert settled(short, PLAIN).rounds > 0
    assert settled(replace(short, meta=TraceMeta()), PLAIN).rounds == 0


def test_what_follows_the_steps_stays_behind_them() -> None:
    loop, kept = Loop(), {"weights": -1}
    for number in range(2):
        loop.builder.step = number
        fragmenting(loop, kept, number)
    loop.builder.step = 2
    evaluation = loop.alloc(11 * MIB)
    loop.free(kept["gradient 0"])
    loop.free(evaluation)
    trace = loop.build((1, 2))
    of = find_round(trace)
    assert of is not None
    longer, _ = repeated(trace, of, 3)
    assert longer.events.bytes[-3] == 11 * MIB and longer.events.step[-1] == 5
    timeline = simulate(longer)
    assert timeline.unknown_frees == 0
    assert timeline.requested[-1] == simulate(trace).requested[-1]


@pytest.mark.parametrize("every", [1, 3])
def test_growth_goes_on(every: int) -> None:
    """What each step keeps stays, and the answer says that it does not settle."""

    def step(loop: Loop, _kept: dict[str, int], number: int) -> None:
        loop.free(loop.alloc(30 * MIB))
        loop.alloc(32 * MIB if number % every == 0 else MIB)

    steady = settled(job(step, 1 + every, (1, 1 + every)), PLAIN)
    assert "still grew" in steady.unsettled


def test_steps_that_release_what_they_did_not_make_are_not_repeated() -> None:
    def step(loop: Loop, kept: dict[str, int], number: int) -> None:
        if not number:
            kept["first"] = loop.alloc(64 * MIB)
        elif number == 2:
            loop.free(kept["first"])
        loop.free(loop.alloc(8 * MIB))

    trace = job(step, 3, (2, 3))
    steady = settled(trace, PLAIN)
    assert steady.trace is trace
    assert f"{64 * MIB:,} bytes" in steady.unsettled
