"""Planned addresses as a lever: where gaps are what does not fit, and nowhere else."""

from __future__ import annotations

import msgspec

from memplan.capturing.options import STEPS_TO_PLAN, CaptureOptions
from memplan.fit.flow import fit
from memplan.recompute.solve import Solver
from memplan.types.trace import PRIVATE_POOLS
from memplan.worker.request import CaptureRequest, Question
from tests.fit.fragmented_job import MIB, SCRIPT, Job, card, fragmented


def test_memory_is_not_given_back_in_every_step() -> None:
    job = Job(card(1500))
    fitted = fit(SCRIPT, job.profile, job, Solver())
    answer, plan = fitted.answer, fitted.plan
    assert answer.before.num_alloc_retries > 0  # it fits, but only just
    assert answer.fits and answer.added_seconds == 0
    assert [lever.kind for lever in answer.levers] == ["addresses"]
    assert answer.levers[0].saved_bytes > 250 * MIB
    assert plan is not None and plan.allocation is not None and not plan.alloc_conf
    assert job.steps == [None, STEPS_TO_PLAN]
    assert answer.after is not None and answer.after.num_alloc_retries == 0
    assert plan.allocation.arena_bytes == 701 * MIB
    assert answer.after.reserved_peak_bytes == 702 * MIB  # pages of 2 MiB


def test_room_for_the_gaps_needs_no_addresses() -> None:
    job = Job(card(4000))
    answer = fit(SCRIPT, job.profile, job, Solver()).answer
    assert answer.fits and not answer.levers and job.steps == [None]


def test_tensors_that_are_too_much_get_no_addresses() -> None:
    job = Job(card(1000))
    assert not fit(SCRIPT, job.profile, job, Solver()).answer.fits
    assert STEPS_TO_PLAN not in job.steps


def test_who_chose_an_allocator_keeps_it() -> None:
    job = Job(card(1500), conf="max_split_size_mb:64")
    answer = fit(SCRIPT, job.profile, job, Solver()).answer
    assert answer.before.num_alloc_retries > 0 and not answer.levers
    assert job.steps == [None]


def test_a_job_with_memory_pools_of_its_own_is_told() -> None:
    job = Job(card(1500), stream=PRIVATE_POOLS)
    answer = fit(SCRIPT, job.profile, job, Solver()).answer
    assert not answer.levers
    assert any("memory pools" in note for note in answer.notes)
    assert STEPS_TO_PLAN not in job.steps  # known without a capture


def test_a_plan_with_addresses_is_estimated_on_its_own_allocator() -> None:
    job = Job(card(1500))
    fitted = fit(SCRIPT, job.profile, job, Solver())
    assert fitted.plan is not None and fitted.answer.after is not None
    request = CaptureRequest(
        program=SCRIPT, options=CaptureOptions(profile=job.profile), plan=fitted.plan
    )
    # As many steps as a capture usually takes, which are fewer than the plan was made from.
    again = Question(request, job.profile).answer(fragmented(2))
    assert again.high_bytes == fitted.answer.after.high_bytes and again.fits
    plain = msgspec.structs.replace(request, plan=None)
    assert Question(plain, job.profile).answer(fragmented(2)).high_bytes > again.high_bytes
