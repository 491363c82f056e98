"""A job that differs from its plan: what differs costs itself, and the place is found again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from memplan.layout.serve import Kind, Served, serve
from memplan.layout.static_plan import StaticPlan, static_plan
from memplan.types.allocation import rounded
from memplan.types.errors import FormatError
from memplan.types.trace import EventKind, Phase, Trace
from tests.layout.jobs import KIB, JobMaker, training
from tests.oracles.served import check_served

LAYERS = 12
STEPS = 6


@pytest.fixture(scope="module")
def job() -> Trace:
    return training(STEPS, LAYERS)


@pytest.fixture(scope="module")
def plan(job: Trace) -> StaticPlan:
    return static_plan(job, seconds=20)


def served(trace: Trace, plan: StaticPlan) -> Served:
    found = serve(trace, plan.part, plan.requests)
    assert check_served(trace, plan.part, found) == ""
    kinds = np.bincount(found.kind, minlength=4)
    assert (found.planned, found.dynamic, found.adopted) == tuple(kinds[1:].tolist())
    return found


def changed(trace: Trace, edit: Callable[[JobMaker, int, int], bool]) -> Trace:
    """The job again, request by request; `edit(job, number, bytes)` may write one its own way and
    then says so."""
    job = JobMaker()
    for number, event in enumerate(trace):
        job.builder.step, job.builder.phase = event.step, event.phase
        if event.kind == EventKind.ALLOC:
            if not edit(job, number, event.bytes):
                job.alloc(str(event.storage), event.bytes, stream=event.stream)
        elif event.kind == EventKind.FREE and str(event.storage) in job.alive:
            job.free(str(event.storage))
    return job.trace()


def inside(trace: Trace, step: int, phase: Phase = Phase.FORWARD) -> list[int]:
    """Requests of one phase of a step."""
    events = trace.events
    mine = (events.kind == EventKind.ALLOC) & (events.step == step) & (events.phase == phase)
    return np.flatnonzero(mine).tolist()


def missing_places(found: Served) -> int:
    """Requests that are not at their planned place."""
    return found.adopted + found.missed


def test_a_request_left_out_costs_none(job: Trace, plan: StaticPlan) -> None:
    gone = inside(job, 3)[7]
    found = served(changed(job, lambda _, number, __: number == gone), plan)
    assert missing_places(found) == 0 and found.resyncs <= 1


def test_a_request_too_much_costs_itself(job: Trace, plan: StaticPlan) -> None:
    before = inside(job, 3)[7]

    def edit(maker: JobMaker, number: int, _: int) -> bool:
        if number == before:
            maker.alloc("log", 3 * KIB)
            maker.free("log")
        return False

    found = served(changed(job, edit), plan)
    assert missing_places(found) == 1 and found.resyncs == 1


def test_a_smaller_request_takes_the_beginning_of_its_place(job: Trace, plan: StaticPlan) -> None:
    which = inside(job, 3)[9]
    smaller = int(job.events.bytes[which]) - 5 * KIB

    def edit(maker: JobMaker, number: int, _: int) -> bool:
        if number == which:
            maker.alloc(str(job.event(number).storage), smaller)
        return number == which

    trace = changed(job, edit)
    found, exact = served(trace, plan), served(job, plan)
    assert missing_places(found) == 0
    assert np.array_equal(found.offset, exact.offset)


def test_a_larger_request_never_takes_its_place(job: Trace, plan: StaticPlan) -> None:
    which = inside(job, 3)[9]

    def edit(maker: JobMaker, number: int, nbytes: int) -> bool:
        if number == which:
            maker.alloc(str(job.event(number).storage), nbytes + 7 * KIB)
        return number == which

    found = served(changed(job, edit), plan)
    assert missing_places(found) == 1


def test_a_last_batch_of_another_size_keeps_its_places(job: Trace, plan: StaticPlan) -> None:
    small = {
        number
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for number in inside(job, STEPS - 1, phase)
        if job.events.bytes[number] != 100 * KIB
    }

    def edit(maker: JobMaker, number: int, nbytes: int) -> bool:
        if number in small:
            maker.alloc(str(job.event(number).storage), nbytes * 5 // 8)
        return number in small

    trace = changed(job, edit)
    found = served(trace, plan)
    assert len(small) > 2 * LAYERS and missing_places(found) == 0


def test_an_evaluation_lives_in_the_arena_and_shifts_nothing(job: Trace, plan: StaticPlan) -> None:
    begins = inside(job, 3)[0]

    def edit(maker: JobMaker, number: int, _: int) -> bool:
        if number == begins:
            maker.builder.phase = Phase.EVALUATION
            for layer in range(LAYERS):
                maker.alloc(f"seen {layer}", (40 + 10 * layer) * KIB)
                if layer:
                    maker.free(f"seen {layer - 1}")
            maker.free(f"seen {LAYERS - 1}")
            maker.builder.phase = Phase.FORWARD
        return False

    found = served(changed(job, edit), plan)
    assert found.adopted == LAYERS and found.missed == 0
    assert found.planned == served(job, plan).planned


def test_half_a_step_left_out_is_found_again(job: Trace, plan: StaticPlan) -> None:
    gone = set(inside(job, 3)[6:]) | set(inside(job, 3, Phase.BACKWARD)[:9])
    found = served(changed(job, lambda _, number, __: number in gone), plan)
    assert missing_places(found) <= 20
    # The next steps are as planned.
    later = changed(job, lambda _, number, __: number in gone).events
    asked = (later.kind == EventKind.ALLOC) & (later.step >= 4)
    assert (found.kind[later.storage[asked]] == Kind.PLANNED).all()


def test_a_request_of_another_stream_is_another_request(job: Trace, plan: StaticPlan) -> None:
    which = inside(job, 3)[9]

    def edit(maker: JobMaker, number: int, nbytes: int) -> bool:
        if number == which:
            maker.alloc(str(job.event(number).storage), nbytes, stream=5)
        return number == which

    assert missing_places(served(changed(job, edit), plan)) == 1


def test_places_depend_on_the_past_alone(job: Trace, plan: StaticPlan) -> None:
    random = np.random.default_rng(7)
    strange = random.random(len(job)) < 0.1

    def edit(maker: JobMaker, number: int, nbytes: int) -> bool:
        if strange[number]:
            size = int(nbytes * random.uniform(0.5, 1.5)) + 1
            maker.alloc(str(job.event(number).storage), size)
        return bool(strange[number])

    trace = changed(job, edit)
    whole = served(trace, plan)
    assert missing_places(whole) > 5
    for stop in random.integers(1, len(trace), 6).tolist():
        events = trace.events
        columns = {field.name: getattr(events, field.name)[:stop] for field in fields(events)}
        part = served(replace(trace, events=type(events)(**columns)), plan)
        seen = events.storage[:stop][events.kind[:stop] == EventKind.ALLOC]
        assert np.array_equal(part.offset[seen], whole.offset[seen])


def test_the_check_notices_what_is_wrong(job: Trace, plan: StaticPlan) -> None:
    found = served(job, plan)
    events = job.events
    first, second = events.storage[events.kind == EventKind.ALLOC][:2].tolist()
    offset = found.offset.copy()
    offset[second] = offset[first]
    assert "share bytes" in check_served(job, plan.part, replace(found, offset=offset))
    offset[second] = plan.part.arena_bytes - rounded(events.bytes[:1])[0] + 512
    assert "does not lie" in check_served(job, plan.part, replace(found, offset=offset))


def test_a_plan_that_cannot_be_is_refused(job: Trace, plan: StaticPlan) -> None:
    lower = plan.requests.lower.copy()
    lower[3] = 1 << 50
    with pytest.raises(FormatError, match="lower of request 3 is"):
        serve(job, plan.part, replace(plan.requests, lower=lower))
