"""The static plan: what a job asks, step after step, has its place, and no two share one."""

from __future__ import annotations

import numpy as np
import pytest

from bench.layout.efficiency import free_problem
from bench.layout.stalloc import stalloc
from memplan.layout.dynamic import data_dependent, matched
from memplan.layout.rounds import Blocks, make_round, round_problem
from memplan.layout.serve import Served, serve
from memplan.layout.static_plan import StaticPlan, plan_of, static_plan
from memplan.layout.step import step_requests
from memplan.layout.streams import NEVER, lifetimes
from memplan.types.allocation import check_allocation, read_requests, rounded
from memplan.types.errors import NoAnswerError
from memplan.types.trace import EventKind, Phase, Trace
from tests.layout.jobs import KIB, JobMaker, training
from tests.oracles.layout_fault import validate

NO_BLOCKS = Blocks(*(np.zeros(0, np.int64) for _ in range(3)))


def planned(trace: Trace) -> tuple[StaticPlan, Served]:
    """The plan of a trace and what it serves of it; no two served storages ever share a byte."""
    found = static_plan(trace, seconds=20)
    check_allocation(found.part)
    served = serve(trace, found.part, read_requests(found.part))
    events, alive = trace.events, dict[int, tuple[int, int]]()
    for row in range(len(trace)):
        storage = int(events.storage[row])
        if events.kind[row] == EventKind.ALLOC and served.offset[storage] >= 0:
            start = int(served.offset[storage])
            end = start + int(events.bytes[row])
            assert end <= found.part.arena_bytes
            assert all(end <= a or b <= start for a, b in alive.values())
            alive[storage] = start, end
        elif events.kind[row] == EventKind.FREE:
            alive.pop(storage, None)
    return found, served


def peak(trace: Trace) -> int:
    events = trace.events
    size = np.zeros(len(trace.storages), np.int64)
    made = events.kind == EventKind.ALLOC
    size[events.storage[made]] = rounded(events.bytes[made])
    sign = made.astype(np.int64) - (events.kind == EventKind.FREE)
    return int(np.cumsum(sign * size[events.storage]).max())


@pytest.mark.parametrize("hold_output", [False, True])
def test_every_request_of_every_step_has_its_place(hold_output: bool) -> None:
    trace = training(steps=5, hold_output=hold_output)
    found, served = planned(trace)
    part = found.part
    # The output that outlives its step has two places in turn.
    assert part.steps == (2 if hold_output else 1)
    assert served.missed == 0 and served.planned == int((trace.events.kind == 0).sum())
    assert found.proved and part.arena_bytes == part.load_bytes == peak(trace)
    assert part.phases[:3] == ["forward 0", "backward 0", "optimizer 0"]


def test_one_request_more_or_less_costs_that_one_alone() -> None:
    found = static_plan(training(), seconds=20)
    changed = JobMaker()
    trace = training()
    storages: dict[int, str] = {}
    skipped = 0
    for event in trace:
        changed.builder.step, changed.builder.phase = event.step, event.phase
        if event.kind == EventKind.ALLOC:
            if event.step == 2 and event.phase == Phase.FORWARD and not skipped:
                skipped = event.storage
                changed.alloc("surprise", 777 * KIB)
                continue
            storages[event.storage] = str(event.storage)
            changed.alloc(str(event.storage), event.bytes)
        elif event.kind == EventKind.FREE and event.storage in storages:
            changed.free(str(event.storage))
    served = serve(changed.trace(), found.part, found.requests)
    assert skipped and served.missed == 1


def test_the_plan_names_what_it_was_made_from() -> None:
    trace = training()
    plan = plan_of(trace, static_plan(trace, seconds=20))
    assert plan.made_from.script == "train.py" and plan.made_from.torch_version == "2.13.0"
    assert len(plan.made_from.requests) == 32 and plan.memplan_version


def test_a_trace_without_a_step_is_refused() -> None:
    job = JobMaker()
    job.alloc("weight", 100)
    with pytest.raises(NoAnswerError, match="no step to plan"):
        static_plan(job.trace(), seconds=1)


def experts(sizes: list[list[int]]) -> Trace:
    """Steps with a router: `nonzero` tells how many rows each expert gets; of those it keeps one
    tensor for backward."""
    job = JobMaker()
    job.builder.module = job.builder.intern("experts")
    for step, rows in enumerate(sizes):
        job.builder.step, job.builder.phase = step, Phase.FORWARD
        job.alloc("hidden", 64 * KIB, shape="4096x16")
        for expert, count in enumerate(rows):
            job.builder.begin_op("aten.nonzero.default", reads=[job.alive["hidden"]])
            job.alloc("index", 8 * count, shape=f"{count}x1")
            job.builder.begin_op("aten.index.Tensor", reads=[job.alive["index"]])
            job.alloc(f"kept {expert}", KIB * count, shape=f"{count}x256")
            job.builder.op_writes([job.alive[f"kept {expert}"]])
            job.builder.op = -1
            job.free("index")
        job.builder.phase = Phase.BACKWARD
        for expert in reversed(range(len(rows))):
            job.alloc("gradient", 300 * KIB)
            job.free("gradient")
            job.free(f"kept {expert}")
        job.free("hidden")
    job.builder.step = len(sizes)
    job.builder.append(EventKind.MARK)
    return job.trace()


def test_what_depends_on_data_goes_to_reusable_space() -> None:
    balanced = experts([[64, 64, 64, 64]] * 4)
    assert data_dependent(balanced).sum() == 4 * 8
    found, served = planned(balanced)
    assert served.missed == 0 and served.dynamic == 4 * 8
    assert {space.module for space in found.part.spaces} == {"experts"}
    uneven = experts([[64, 64, 64, 64], [20, 108, 64, 64], [70, 70, 58, 58], [90, 31, 71, 64]])
    served = serve(uneven, found.part, found.requests)
    assert served.missed == 0 and served.dynamic == 4 * 8


def test_what_the_next_step_does_not_repeat_is_dynamic() -> None:
    left, right = np.array([5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]), np.array([5, 6, 8, 9, 1, 2, 3, 4])
    assert matched(left, right).tolist() == [True, True, False] + [True] * 6 + [False] * 2


def two_streams(*, wait: bool) -> Trace:
    job = JobMaker()
    job.alloc("big", 1000 * KIB)
    for event, (recorder, waiter) in enumerate([(0, 1), (1, 0)]):
        if event == 1:
            job.alloc("side", 8 * KIB, stream=1)
            job.free("side")
        if wait:
            job.builder.append(EventKind.EVENT_RECORD, stream=recorder, aux=event)
            job.builder.append(EventKind.EVENT_WAIT, stream=waiter, aux=event)
    job.alloc("lent", 9 * KIB)
    job.builder.append(EventKind.RECORD_STREAM, job.alive["lent"], stream=1)
    job.free("lent")
    if wait:
        job.builder.append(EventKind.SYNCHRONIZE, stream=-1)
    return job.trace()


def test_lifetimes_reach_to_the_waits_between_streams() -> None:
    life = lifetimes(two_streams(wait=True), 0)
    # 0 big; 1 record, 2 wait; 3 side, 4 freed; 5 record, 6 wait; 7 lent, 8 used, 9 freed; 10 all.
    assert life.begin.tolist() == [0, 3, 7]
    assert life.end.tolist() == [NEVER, 6, 10]
    apart = lifetimes(two_streams(wait=False), 0)
    assert apart.begin[1] == 1 and apart.end[1] == apart.end[2] == NEVER - 1


def test_order_passes_through_streams_without_requests() -> None:
    """A gather on its own stream: 5 copies in for it, 7 computes on what it gives."""
    job = JobMaker()

    def waits(stream: int, for_: int, event: int) -> None:
        job.builder.append(EventKind.EVENT_RECORD, stream=for_, aux=event)
        job.builder.append(EventKind.EVENT_WAIT, stream=stream, aux=event)

    job.alloc("big", 1000 * KIB)  # 0
    job.free("big")  # 1: stream 5 has not seen this
    job.alloc("copy", 8 * KIB, stream=5)  # 2
    waits(6, 5, 0)  # 3, 4
    waits(0, 6, 1)  # 5, 6: what stream 5 did, by way of stream 6
    job.free("copy")  # 7
    job.alloc("after", 8 * KIB)  # 8
    life = lifetimes(job.trace(), 0)
    assert life.begin.tolist() == [0, -1, 8]
    assert life.end.tolist() == [1, 7, NEVER]


def test_the_stream_with_more_bytes_is_not_widened() -> None:
    job = JobMaker()
    job.alloc("main", 1000 * KIB)  # 0
    job.alloc("gather", 500 * KIB, stream=5)  # 1
    job.alloc("reduced", 8 * KIB, stream=7)  # 2
    job.free("reduced")  # 3: nobody ever sees what stream 7 did
    job.free("gather")  # 4
    job.alloc("next", 500 * KIB, stream=5)  # 5
    life = lifetimes(job.trace(), 0)
    assert life.begin.tolist() == [0, 1, 2, 5]
    assert life.end.tolist() == [NEVER, NEVER - 1, NEVER - 1, NEVER]


def test_the_planners_that_know_no_fixed_rows_have_a_problem_of_their_own() -> None:
    made = make_round(step_requests(training(hold_output=True)))
    problem = free_problem(made)
    phase = np.maximum(made.phase[made.planned], 0)
    layout = stalloc(problem, phase, phase)
    assert validate(problem, layout.offsets, layout.height) == ""
    assert layout.height >= problem.max_load
    ours, rows = round_problem(made, NO_BLOCKS)
    assert len(ours) == len(rows) >= len(problem)
    with pytest.raises(ValueError, match="fixed"):
        stalloc(ours, phase, phase)
