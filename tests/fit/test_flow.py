"""The flow from a program to a plan, on a job made by hand in place of a capture."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memplan.capturing.options import ScriptTarget
from memplan.fit import flow, low_bit
from memplan.fit.answer import Fit, Lever, Numbers
from memplan.fit.choice import Limits
from memplan.fit.flow import Fitted, fit
from memplan.fit.judge import Verdict
from memplan.fit.state import State
from memplan.fit.text import fit_lines
from memplan.phases import plain_peak, step_graph
from memplan.types.device import find_profile
from memplan.types.plan import Plan
from memplan.worker.captures import Captured
from memplan.worker.failure import CaptureFailedError
from tests.fit.chain_job import BATCH, MIB, ChainProgram, Greedy, capturing, not_captured

SOURCE = 'parser.add_argument("--batch-size", type=int, default=8)\n'


@pytest.fixture
def program(tmp_path: Path) -> ScriptTarget:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    return ScriptTarget("script", str(script), ("--lr", "1"))


def run(program: ScriptTarget, job: ChainProgram) -> Fitted:
    return fit(program, job.profile, job, Greedy())


def job(card: str, **options: object) -> ChainProgram:
    return ChainProgram(find_profile(card), **options)  # type: ignore[arg-type]


def test_the_job_by_hand_is_what_the_planner_thinks_it_is(program: ScriptTarget) -> None:
    """The stand-in for captures follows a plan as the evaluation of that plan says."""
    chain = job("2600MiB")
    fitted = run(program, chain)
    assert fitted.answer.attempts
    for attempt, (asked, plan) in zip(fitted.answer.attempts, chain.asked[1:], strict=True):
        captured = chain(asked, plan)
        assert plain_peak(step_graph(captured.trace)) == attempt.planned_bytes


def test_what_fits_is_left_alone(program: ScriptTarget) -> None:
    chain = job("24GiB")
    fitted = run(program, chain)
    answer = fitted.answer
    assert answer.fits and answer.after is None and answer.before.fits
    assert not answer.levers and not answer.attempts and answer.added_seconds == 0
    assert len(chain.asked) == 1
    assert fitted.plan is not None and fitted.plan.recompute is None
    assert fitted.plan.made_from.command == [program.name, "--lr", "1"]


def test_a_plan_that_fits(program: ScriptTarget) -> None:
    chain = job("2600MiB")
    fitted = run(program, chain)
    answer = fitted.answer
    assert answer.fits and not answer.before.fits
    assert answer.after is not None and answer.after.fits
    assert answer.after.high_bytes <= chain.profile.total_memory_bytes
    assert fitted.plan is not None and fitted.plan.recompute is not None
    part = fitted.plan.recompute
    assert part.peak_bytes == answer.after.allocated_peak_bytes
    assert part.added_seconds == pytest.approx(answer.added_seconds) and part.added_seconds > 0
    assert answer.step_seconds is not None
    assert answer.added_fraction == pytest.approx(answer.added_seconds / answer.step_seconds)
    levers = [lever for lever in answer.levers if lever.kind == "recompute"]
    dropped = sum(len(group.drop) for group in part.groups)
    assert sum(lever.values for lever in levers) == dropped
    assert sum(lever.saved_bytes for lever in levers) == 64 * MIB * dropped
    assert sum(lever.added_seconds for lever in levers) == pytest.approx(answer.added_seconds)
    assert fitted.plan.made_from.forward_ops == 25
    assert fitted.plan.made_from.ranks == 1
    assert len(fitted.plan.made_from.requests) == 32
    assert not answer.changes and not answer.tried


def test_of_the_plans_that_fit_the_quickest_is_kept(program: ScriptTarget) -> None:
    answer = run(program, job("2600MiB")).answer
    quickest = min(a.added_fraction for a in answer.attempts if a.fits)
    assert answer.added_fraction == pytest.approx(quickest)


def test_a_plan_that_needs_more_than_planned_is_made_tighter(program: ScriptTarget) -> None:
    exact = run(program, job("2600MiB")).answer
    answer = run(program, job("2600MiB", ballast=lambda attempt: 300 * MIB)).answer
    assert answer.fits
    assert not answer.attempts[0].fits
    assert answer.attempts[1].budget_bytes < answer.attempts[0].budget_bytes
    assert answer.added_fraction > exact.added_fraction


def test_a_plan_that_leaves_much_spare_is_made_looser_once(program: ScriptTarget) -> None:
    answer = run(program, job("2400MiB", ballast=lambda attempt: -100 * MIB)).answer
    assert answer.fits and [a.fits for a in answer.attempts] == [True, True, True]
    first, least, second = answer.attempts
    assert least.budget_bytes == 0 and least.planned_bytes < first.planned_bytes
    assert second.budget_bytes > first.planned_bytes
    assert second.added_fraction < first.added_fraction < least.added_fraction
    assert answer.added_fraction == pytest.approx(second.added_fraction)


def test_a_lever_that_adds_more_than_the_plan_in_hand_is_not_captured(
    program: ScriptTarget,
) -> None:
    """State on the host, whose time is that of moving it; the job by hand refuses it when asked."""
    asked = "Optimizer state stays on the card: the script fails with it."
    fitted = run(program, job("2600MiB")).answer
    moved = 2 * 8 * MIB * 24 / find_profile("2600MiB").host_link_bytes_per_second
    assert fitted.fits and fitted.added_fraction > 0.05 and fitted.added_seconds < moved
    assert asked not in fitted.notes and "state" not in fitted.levers_tried
    assert asked in run(program, job("1250MiB")).answer.notes


def test_state_that_moves_quickly_goes_to_the_host_before_anything_is_recomputed(
    program: ScriptTarget,
) -> None:
    """In the time of a slow step; of a quick one, recomputation is planned first."""
    slow = job("2900MiB", moves_state=True, flops=10**15)
    fitted = run(program, slow)
    assert [lever.kind for lever in fitted.answer.levers if lever.kind != "allocator"] == ["state"]
    assert fitted.answer.fits and fitted.answer.added_fraction < 0.02
    assert all(plan is None or plan.recompute is None for _, plan in slow.asked)
    quick = job("2900MiB", moves_state=True)
    fitted = run(program, quick)
    tried = [plan for _, plan in quick.asked if plan is not None]
    assert fitted.answer.fits and tried[0].state is None and tried[0].recompute is not None


def test_little_state_is_not_captured_on_the_host(program: ScriptTarget) -> None:
    chain = job("1250MiB", moves_state=True, flops=10**15, weight=MIB // 4)
    assert "recompute" in run(program, chain).answer.levers_tried
    assert all(plan is None or plan.state is None for _, plan in chain.asked)


def test_progress_names_recomputation_after_a_lever_that_did_not_help(
    program: ScriptTarget,
) -> None:
    said: list[str] = []
    chain = job("2600MiB", flops=10**15)
    assert fit(program, chain.profile, chain, Greedy(), said.append).answer.fits
    stages = [stage for stage, _ in groupby(text.partition(" (")[0] for text in said)]
    looks, tries = "looking for a plan", "trying optimizer state on the host"
    assert stages[1:4] == [looks, tries, looks]


@pytest.mark.parametrize("allow", ["exact", "rounding", "numbers"])
def test_state_in_8_bits_only_where_another_method_is_allowed(
    program: ScriptTarget, allow: Numbers
) -> None:
    chain = job("2900MiB")
    fitted = fit(program, chain.profile, chain, Greedy(), limits=Limits(allow))
    answer, plan = fitted.answer, fitted.plan
    assert answer.fits and plan is not None
    kinds = {lever.kind: lever.numbers for lever in answer.levers}
    if allow == "numbers":
        assert kinds["low_bit"] == "numbers" and plan.recompute is None
        assert plan.low_bit is not None and plan.low_bit.state_bytes == 24 * 4 * MIB
        assert plan.low_bit.peak_bytes and answer.exact is not None and answer.exact.fits
        assert any("another method" in line.plain for line in fit_lines(answer))
    else:
        assert "low_bit" not in kinds and plan.low_bit is None
        assert all(one is None or one.low_bit is None for _, one in chain.asked)


def test_state_in_8_bits_is_tried_without_state_on_the_host(program: ScriptTarget) -> None:
    chain = job("2900MiB", moves_state=True, flops=10**15)
    limits = Limits("numbers", frontier=True)
    answer = fit(program, chain.profile, chain, Greedy(), limits=limits).answer
    assert answer.fits and answer.added_seconds == 0
    plans = [plan for _, plan in chain.asked if plan is not None]
    assert any(plan.low_bit for plan in plans) and any(plan.state for plan in plans)
    assert not any(plan.low_bit and plan.state for plan in plans)


def test_without_torchao_nothing_is_captured_with_it(
    program: ScriptTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit, "find_spec", lambda name: None)
    chain = job("2900MiB")
    answer = fit(program, chain.profile, chain, Greedy(), limits=Limits("numbers")).answer
    assert all(plan is None or plan.low_bit is None for _, plan in chain.asked)
    assert any("pip install torchao" in note for note in answer.notes)


def test_a_looser_plan_that_does_not_fit_is_not_kept(program: ScriptTarget) -> None:
    chain = job("2600MiB", ballast=lambda attempt: -150 * MIB if attempt == 1 else 600 * MIB)
    answer = run(program, chain).answer
    assert [a.fits for a in answer.attempts] == [True, False, False]
    assert answer.fits and answer.after is not None and answer.after.fits
    assert answer.added_fraction == pytest.approx(answer.attempts[0].added_fraction)


def test_the_least_peak_is_tried_before_giving_up(program: ScriptTarget) -> None:
    answer = run(program, job("2600MiB", ballast=lambda attempt: 2600 * MIB)).answer
    assert not answer.fits
    assert answer.attempts[-1].budget_bytes == 0
    assert answer.attempts[-1].planned_bytes == min(a.planned_bytes for a in answer.attempts)


@pytest.fixture
def placing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan with recomputation fits with planned addresses."""

    def placed(state: State) -> State:
        if state.plan.recompute is None:
            return state
        estimate = msgspec.structs.replace(state.verdict.estimate, fits=True)
        lever = Lever(kind="addresses", name="1 planned", bound="")
        changed = state.with_lever(lever).with_parts(alloc_conf="planned")
        return replace(changed, verdict=Verdict(estimate, addresses=True))

    monkeypatch.setattr(flow, "with_planned_addresses", placed)


@pytest.mark.usefixtures("placing")
def test_a_plan_that_does_not_fit_for_gaps_gets_addresses_before_dearer_levers(
    program: ScriptTarget,
) -> None:
    chain = job("2600MiB", ballast=lambda attempt: 2600 * MIB, moves_state=True)
    answer = run(program, chain).answer
    assert answer.fits and [one.kind for one in answer.levers][-1] == "addresses"
    assert all(plan is None or plan.state is None for _, plan in chain.asked)


@pytest.mark.usefixtures("placing")
def test_a_cheaper_plan_that_does_not_fit_for_gaps_gets_addresses(program: ScriptTarget) -> None:
    chain = job("2300MiB", ballast=lambda attempt: 300 * MIB * (attempt == 1))
    answer = run(program, chain).answer
    cheap, *others = answer.attempts
    assert not cheap.fits and any(one.fits for one in others)
    assert all(one.added_fraction > cheap.added_fraction + 0.05 for one in others if one.fits)
    assert answer.levers[-1].kind == "addresses"
    assert answer.added_fraction == pytest.approx(cheap.added_fraction)


@pytest.mark.parametrize("card", ["3300MiB", "3500MiB"])
def test_less_state_goes_to_the_host_where_more_recomputation_is_cheaper(
    program: ScriptTarget, card: str
) -> None:
    """Of the larger card all state on the host is enough."""
    chain = job(card, moves_state=True, weight=32 * MIB, flops=10**10)
    answer = run(program, chain).answer
    moved = 2 * 32 * MIB * 24 / chain.profile.host_link_bytes_per_second
    shares = {plan.state.share for _, plan in chain.asked if plan is not None and plan.state}
    assert answer.fits and max(shares) == 1 and len(shares) == 2
    assert answer.added_seconds < 0.8 * moved
    assert {"state", "recompute"} <= {lever.kind for lever in answer.levers}


def test_no_plan_fits_but_a_smaller_batch_does(program: ScriptTarget) -> None:
    chain = job("1250MiB", weight=2 * MIB)
    answer = run(program, chain).answer
    assert not answer.fits and answer.after is not None and not answer.after.fits
    assert answer.after.high_bytes == min(a.high_bytes for a in answer.attempts)
    batch = next(change for change in answer.changes if change.kind == "batch_size")
    assert batch.before == BATCH and 1 <= batch.after < BATCH and batch.fits and batch.recompute
    assert batch.command == [program.name, "--lr", "1", "--batch-size", str(batch.after)]
    assert batch.high_bytes <= chain.profile.total_memory_bytes
    tried = {program.argv for program, _ in chain.asked if "--batch-size" in program.argv}
    assert tuple(batch.command[1:]) in tried, "captured with that value"
    larger = ScriptTarget("script", program.name, ("--batch-size", str(batch.after + 1)))
    assert not chain(larger, chain.asked[-1][1]).estimate.fits
    assert any("sequence length" in text for text in answer.tried)


def test_a_sharded_optimizer_helps_where_its_state_is_what_is_large(program: ScriptTarget) -> None:
    chain = job("5GiB", weight=64 * MIB, layers=24)
    answer = run(program, chain).answer
    assert not answer.fits
    sharded = next(change for change in answer.changes if change.kind == "sharded_optimizer")
    assert sharded.after in (2, 4, 8) and sharded.fits and not sharded.command
    assert sharded.high_bytes <= chain.profile.total_memory_bytes


def test_nothing_helps(tmp_path: Path) -> None:
    script = tmp_path / "fixed.py"
    script.write_text("batch_size = 8\n")
    answer = run(ScriptTarget("script", str(script)), job("700MiB", weight=32 * MIB)).answer
    assert not answer.fits and not answer.changes
    assert len(answer.tried) == 2 and "8 GPUs" in answer.tried[-1]


def test_a_batch_size_that_the_script_refuses_does_not_count(program: ScriptTarget) -> None:
    chain = job("1250MiB", weight=2 * MIB, refuses=lambda batch: batch < BATCH)
    answer = run(program, chain).answer
    assert not any(change.kind == "batch_size" for change in answer.changes)
    assert any("could not be captured: no batch of 1" in text for text in answer.tried)


def test_early_updates_alone_where_they_are_enough(program: ScriptTarget) -> None:
    chain = job("13GiB", weight=128 * MIB, clips=False)
    fitted = run(program, chain)
    answer = fitted.answer
    assert answer.fits and not answer.before.fits and answer.after is not None
    (lever,) = (lever for lever in answer.levers if lever.kind == "order")
    assert lever.values == chain.layers and lever.added_seconds == 0 == answer.added_fraction
    assert lever.saved_bytes > 1 << 30
    assert not answer.attempts and fitted.plan is not None and fitted.plan.recompute is None
    part = fitted.plan.order
    assert part is not None and part.gradient_bytes == chain.layers * 128 * MIB
    assert part.peak_bytes == answer.after.allocated_peak_bytes
    assert len(chain.asked) == 2 and "2 captures" in lines(answer)


def test_early_updates_and_recomputation(program: ScriptTarget) -> None:
    chain = job("11GiB", weight=128 * MIB, clips=False)
    fitted = run(program, chain)
    assert fitted.answer.fits and fitted.plan is not None
    assert fitted.plan.order is not None and fitted.plan.recompute is not None
    assert fitted.plan.order.peak_bytes == fitted.plan.recompute.peak_bytes
    planned = [plan for _, plan in chain.asked[1:]]
    assert all(plan is not None and plan.order is not None for plan in planned)
    clipped = run(program, job("11GiB", weight=128 * MIB)).answer
    assert not clipped.fits or clipped.added_fraction > fitted.answer.added_fraction


def test_a_job_that_clips_has_no_early_updates(program: ScriptTarget) -> None:
    chain = job("13GiB", weight=128 * MIB)
    answer = run(program, chain).answer
    assert not any(lever.kind == "order" for lever in answer.levers)
    assert all(plan is None or plan.order is None for _, plan in chain.asked)
    assert any("linalg_vector_norm.default uses gradients" in note for note in answer.notes)


def test_early_updates_that_fail_are_left_out(program: ScriptTarget) -> None:
    """As where the script does not run with them, or not with recomputation as well."""
    for together, card in ((False, "13GiB"), (True, "11GiB")):
        chain = job(card, weight=128 * MIB, clips=False)
        assert any(lever.kind == "order" for lever in run(program, chain).answer.levers)

        def capture(
            program: ScriptTarget,
            plan: Plan | None = None,
            *,
            quiet: bool = False,
            steps: int | None = None,
            together: bool = together,
            chain: ChainProgram = chain,
        ) -> Captured:
            if plan is not None and plan.order and (plan.recompute is not None) == together:
                raise not_captured("it fails")
            return chain(program, plan)

        answer = fit(program, chain.profile, capture, Greedy()).answer
        kinds = {lever.kind for lever in answer.levers}
        assert not {"order", "recompute"} <= kinds
        assert together or "order" not in kinds
        with_both = "With the optimizer's updates changed and recomputation, the script fails:"
        said = with_both if together else "the script fails with"
        assert any(said in note for note in answer.notes)


def test_why_a_capture_has_no_early_updates_is_said(program: ScriptTarget) -> None:
    chain = job("13GiB", weight=128 * MIB, clips=False)

    @capturing
    def capture(program: ScriptTarget, plan: Plan | None) -> Captured:
        if plan is None or plan.order is None or plan.state is not None:
            return chain(program, plan)
        plain = chain(program)
        unmet = {"order": "In its own words.", "state": "Of another part."}
        meta = msgspec.structs.replace(plain.trace.meta, unmet=unmet)
        return replace(plain, trace=replace(plain.trace, meta=meta))

    answer = fit(program, chain.profile, capture, Greedy()).answer
    assert "In its own words." in answer.notes and "Of another part." not in answer.notes


def test_recomputation_that_fails_is_left_out(program: ScriptTarget) -> None:
    chain = job("2600MiB")

    @capturing
    def capture(program: ScriptTarget, plan: Plan | None) -> Captured:
        if plan is not None and plan.recompute is not None:
            raise not_captured("it fails")
        return chain(program, plan)

    answer = fit(program, chain.profile, capture, Greedy()).answer
    assert not answer.fits and answer.changes[0].kind == "batch_size"
    assert "With recomputation, the script fails: it fails." in answer.notes


def test_what_is_kept_for_a_second_derivative_is_said(
    program: ScriptTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplan.fit.flow.differentiated_bytes", lambda trace: 3 * MIB)
    said = [
        any(note.startswith("3 MiB that autograd keeps") for note in run(program, one).answer.notes)
        for one in (job("1250MiB"), job("13GiB"))
    ]
    assert said == [True, False]


def lines(answer: Fit) -> str:
    return "\n".join(line.plain for line in fit_lines(answer))


def test_a_failing_capture_passes_through(program: ScriptTarget) -> None:
    with pytest.raises(CaptureFailedError) as failed:
        run(program, job("2600MiB", refuses=lambda batch: True))
    assert failed.value.outcome.exit_code == 4


def test_a_job_without_backward_gets_changes_only(
    program: ScriptTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a trace has no graph to plan on; what helps is still looked for."""
    chain = job("1250MiB", weight=2 * MIB)

    @capturing
    def forward_only(program: ScriptTarget, plan: Plan | None) -> Captured:
        captured = chain(program)
        object.__setattr__(
            captured.trace.ops, "moved_bytes", np.full(len(captured.trace.ops), -1, np.int64)
        )
        return captured

    fitted = fit(program, chain.profile, forward_only, Greedy())
    assert not fitted.answer.fits and fitted.plan is None and not fitted.answer.attempts
    assert any("Nothing can be recomputed" in note for note in fitted.answer.notes)
    assert fitted.answer.changes[0].kind == "batch_size"
    assert not fitted.answer.changes[0].recompute


def test_smaller_batches_take_the_place_of_state_on_the_host(program: ScriptTarget) -> None:
    """Not the largest that fit by themselves, but the next larger, with some recomputation."""
    Path(program.name).write_text(SOURCE + 'parser.add_argument("--accumulate", default=1)\n')
    chain = job("2000MiB", moves_state=True, flops=10**9)
    fitted = fit(program, chain.profile, chain, Greedy(), limits=Limits("rounding"))
    plans = [plan for _, plan in chain.asked if plan is not None]
    assert any(plan.state and plan.arguments for plan in plans), "on top of it first"
    assert fitted.plan is not None and fitted.plan.arguments is not None
    assert fitted.plan.state is None and fitted.plan.recompute is not None
    alone = [one for one in plans if one.arguments and not (one.state or one.recompute)]
    batches = {one.arguments.changes[0].value for one in alone if one.arguments}
    assert fitted.plan.arguments.changes[0].value > min(batches)
    assert fitted.answer.exact is not None
    assert fitted.answer.added_fraction < fitted.answer.exact.added_fraction / 2
