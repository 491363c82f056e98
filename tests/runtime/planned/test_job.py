"""A job from its first step to its outcome, over a library that keeps books alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from memplan.layout.static_plan import static_plan
from memplan.runtime.planned import phases
from memplan.runtime.planned.account import HitRate, Policy
from memplan.runtime.planned.background import Planning
from memplan.runtime.planned.job import Job
from memplan.runtime.planned.outcome import line, outcome
from memplan.runtime.planned.recording import observed_meta
from memplan.runtime.planned.statistics import Peaks
from memplan.types.allocation import check_allocation
from memplan.types.errors import MemplanError
from memplan.types.plan import AllocationPart
from memplan.types.trace import Phase
from tests.runtime.planned.fake_library import FakeLibrary, StorageWatch, wait_for_plan

META: tuple[list[str], str, str, str] = ([], "2.13.0", "", "")


class Script:
    """A training loop, step by step."""

    def __init__(self, width: int = 256) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, batch: int = 32) -> None:
        self.model(torch.randn(batch, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            for _ in range(50):
                self.model(torch.randn(7, 64))


class Told:
    """What was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str) -> None:
        self.lines.append(text)


@contextmanager
def running(
    library: FakeLibrary, said: Told | None = None, **options: Any
) -> Iterator[tuple[Job, Script]]:
    job = Job(cast(Any, library), [0], observed_meta(*META), say=said or Told(), **options)
    with job, StorageWatch(library):
        yield job, Script()


def _planned(policy: Policy | None = None) -> AllocationPart:
    """The plan of a script, from a recording of it."""
    library = FakeLibrary()
    with running(library, record_all=True, policy=policy) as (job, script):
        for _ in range(4):
            script.step()
    assert job.recorded is not None
    return static_plan(job.recorded).part


def test_without_a_plan_the_first_steps_are_recorded_planned_and_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(phases, "has_compiled", lambda: False)  # in an earlier test
    library, said = FakeLibrary(), Told()
    with running(library, said) as (job, script):
        for _ in range(4):  # the first makes the state, two are alike, one more
            assert not library.loads
            script.step()
        assert not script.model[0]._forward_hooks and script.model._forward_hooks
        script.step()
        wait_for_plan(job)
        script.step()
        assert library.loads and library.loads[0][1]
        for _ in range(3):
            script.step()
    found = outcome(job)
    assert said.lines == []
    assert found.steps == 9
    assert found.plans[0].step == 6
    assert (found.hit_rate or 0) >= 0.95
    device = found.devices[0]
    assert device.without_from_steps == 4
    assert (device.reserved_peak_without_bytes or 0) >= device.allocated_peak_bytes
    assert library.phases[-3:] == [1, 2, 0]
    assert "with the plan (from step 6 on)" in line(found)
    assert "simulated from the first 4 steps" in line(found)


def test_a_given_plan_serves_from_the_beginning() -> None:
    part, library, said = _planned(), FakeLibrary(), Told()
    with running(library, said, plan=part) as (job, script):
        assert library.loads == [(part.requests, False)]
        for _ in range(6):
            script.step()
    found = outcome(job, "job.plan")
    assert said.lines == [] and len(library.loads) == 1
    assert found.hit_rate == 1.0
    assert found.plan == "job.plan"
    assert (found.hook_seconds_per_step or 0) > 0
    assert "with the plan, " in line(found)


def test_evaluations_do_not_count() -> None:
    part, library, said = _planned(), FakeLibrary(), Told()
    with running(library, said, plan=part) as (job, script):
        for _ in range(8):
            script.step()
            script.evaluate()
    assert (outcome(job).hit_rate or 0) > 0.95
    assert -1 in library.phases
    assert said.lines == []


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("longer", "again"), [(30.0, True), (0.5, False), (0.0, False)])
def test_a_job_that_changes_is_planned_again_when_that_pays(longer: float, again: bool) -> None:
    """Twelve steps of another size, of which each takes so much longer: planning costs 20 s."""
    part, library, said, clock = _planned(), FakeLibrary(), Told(), Clock()
    with running(library, said, plan=part, clock=clock) as (job, script):
        for _ in range(5):
            clock.now += 10.0
            script.step()
        assert not said.lines
        for _ in range(12):
            clock.now += 10.0 + longer
            script.step(batch=48)
            wait_for_plan(job)
    assert len(library.loads) == (2 if again else 1)
    assert len(said.lines) == again and all("planning again" in text for text in said.lines)
    if again:
        assert library.loads[1][1] and (outcome(job).hit_rate or 0) > 0.9
    assert outcome(job).planning is None  # no step without a plan was seen


def test_memory_that_lies_unused_is_worth_a_plan() -> None:
    """Steps of a new size take no longer, but a quarter of the card is reserved for nothing."""
    part, library, said, clock = _planned(), FakeLibrary(), Told(), Clock()
    card = 4 << 30
    with running(library, said, plan=part, clock=clock, card_bytes=card) as (job, script):
        for step in range(16):
            if step >= 4:
                library.counts.reserved = card // 4
            clock.now += 10.0
            script.step(batch=48 if step >= 4 else 32)
            wait_for_plan(job)
    assert len(said.lines) == 1 and "planning again" in said.lines[0]


def test_the_outcome_says_when_planning_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "has_compiled", lambda: False)  # in an earlier test
    library, clock = FakeLibrary(), Clock()
    with running(library, clock=clock) as (job, script):
        for _ in range(12):
            clock.now += 3.0 if library.loads else 5.0
            script.step()
            wait_for_plan(job)
    planning = outcome(job).planning
    assert planning is not None
    assert planning.step_seconds == 3.0
    assert planning.step_seconds_before == pytest.approx(5.0, abs=0.2)
    assert planning.seconds == 5.0  # the planner is seen to have ended one step later
    assert planning.paid_after_steps == 3
    said = line(outcome(job), 36.0)
    assert "planning took 5.0 s (0.050 at 36/h), paid for by 3 steps" in said


def test_a_plan_larger_than_the_card_is_left_alone() -> None:
    part, library, said = _planned(), FakeLibrary(), Told()
    with running(library, said, plan=part, card_bytes=part.arena_bytes - 1) as (job, script):
        for _ in range(5):
            script.step()
    assert not library.loads
    assert "the card has" in said.lines[0] and "memplan fit" in said.lines[0]
    assert "no plan in effect" in line(outcome(job))


def test_a_plan_that_the_library_refuses_is_left_alone() -> None:
    part, library, said = _planned(), FakeLibrary(), Told()
    library.refuse = "request 3 overlaps"
    with running(library, said, plan=part) as (job, script):
        script.step()
    assert "request 3 overlaps" in said.lines[0] and "ordinary allocator" in said.lines[0]
    assert job.hit_rate is None


def test_a_fault_of_ours_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(_trace: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr("memplan.runtime.planned.job.Planning", faulty)
    library, said, record = FakeLibrary(), Told(), torch.cuda.Event.record
    with running(library, said) as (job, script):
        for _ in range(6):
            script.step()
        assert torch.cuda.Event.record is record
    assert len(said.lines) == 1 and "ValueError: on purpose" in said.lines[0]
    assert outcome(job).steps == 6


def test_a_recording_without_room_is_no_plan() -> None:
    library, said = FakeLibrary(), Told()
    with running(library, said, policy=Policy(most_events=20)) as (_, script):
        for _ in range(6):
            script.step()
    assert said.lines == ["no plan: a step makes more requests than are recorded"]
    assert not library.loads


def test_steps_that_never_repeat_are_planned_all_the_same() -> None:
    library, said = FakeLibrary(), Told()
    with running(library, said, policy=Policy(most_steps=4)) as (job, script):
        for step in range(7):
            script.step(batch=16 + 8 * step)
            wait_for_plan(job)
    assert len(library.loads) == 1 and not said.lines


def test_everything_is_recorded_where_that_is_asked_for() -> None:
    library = FakeLibrary()
    with running(library, record_all=True) as (job, script):
        for _ in range(12):
            script.step()
    assert job.recorded is not None and job.recorded.meta.optimizer_steps == 12
    assert "Sequential" in job.recorded.strings
    assert not library.loads


def test_a_job_that_ends_early_has_an_outcome() -> None:
    library = FakeLibrary()
    with running(library) as (job, script), torch.no_grad():
        script.model(torch.randn(3, 64))
    found = outcome(job)
    assert found.steps == 0 and found.plans == []
    assert line(found).endswith("no plan in effect")


def test_a_job_that_asks_for_nothing_says_nothing() -> None:
    job = Job(cast(Any, FakeLibrary()), [0], observed_meta(*META))
    with job:
        pass
    assert line(outcome(job)) == ""


def test_a_planner_that_finds_nothing_says_why() -> None:
    library = FakeLibrary()
    with running(library, record_all=True) as (job, script), torch.no_grad():
        script.model(torch.randn(3, 64))
    assert job.recorded is not None
    planning = Planning(job.recorded)
    try:
        with pytest.raises(MemplanError, match="no step"):
            planning.plans()
    finally:
        planning.close()


def test_a_planner_plans_the_round_for_each_device() -> None:
    library = FakeLibrary()
    with running(library, record_all=True) as (job, script):
        for _ in range(4):
            script.step()
    assert job.recorded is not None
    planning = Planning(job.recorded)
    (plan,) = planning.plans()
    planning.close()
    assert plan.allocation is not None and plan.allocation.setup == 0
    check_allocation(plan.allocation)
    assert not Path(planning._folder.name).exists()


def test_peaks_of_the_user_and_ours_begin_when_each_says() -> None:
    library = FakeLibrary()
    peaks = Peaks(cast(Any, library))
    library.free(library.malloc(4096))
    peaks.begin_ours(0)
    library.free(library.malloc(1024))
    seen = peaks.statistics(0)
    assert seen is not None and seen.allocated_peak == 4096
    assert peaks.ours(0)["allocated_peak"] == 1024
    library.free(library.malloc(2048))
    peaks.reset_users(0)
    library.free(library.malloc(512))
    seen = peaks.statistics(0)
    assert seen is not None and seen.allocated_peak == 512
    assert peaks.ours(0)["allocated_peak"] == 2048


def test_hits_are_counted_while_the_plan_knows_the_job() -> None:
    library = FakeLibrary()
    library.malloc(1)
    rate = HitRate(cast(Any, library), [0])
    library.counts.hits += 3
    library.counts.misses += 1
    assert rate.total() == (3, 4) and rate.window().rate == 0.75
    rate.leave()
    library.counts.misses += 100
    assert rate.total() == (3, 4)
    rate.come_back()
    library.counts.dynamic += 1
    assert rate.window() == (1, 1) and rate.total().rate == 0.8


def test_phases_are_told_to_every_device() -> None:
    library = FakeLibrary()
    part = _planned()
    job = Job(cast(Any, library), [0], observed_meta(*META), plan=part)
    with job:
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            job.entered(phase)
    assert library.phases == [0, 1, 2]
