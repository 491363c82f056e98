"""Recomputation inside compiled graphs, as a lever: on a job made by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.fit.flow import fit
from memplan.fit.text import fit_lines
from memplan.types.device import find_profile
from memplan.types.plan import CompiledRegion, OpOutput, Plan, RecomputeGroup, RecomputePart
from memplan.types.plan_file import load_plan, save_plan
from memplan.worker.captures import Captured
from tests.fit.chain_job import ChainProgram, Greedy

LAYERS = 24


@dataclass
class CompiledChain(ChainProgram):
    """Of 24 layers a share of every second one's output is recomputed; none of them eagerly."""

    alone: int = 11
    """So many at most, where graphs are not told of others beside them."""

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        count, regions = 0, list[CompiledRegion]()
        if plan is not None and plan.regions is not None:
            regions = plan.regions.regions
            most = 11 if plan.regions.beside else self.alone
            count = len(regions[0].recomputed) if regions else round(plan.regions.share * most)
            names = [f"mm_{n}" for n in range(count)]
            regions = regions or [CompiledRegion("ab", "train.py:7", names)]
        groups = [RecomputeGroup(str(n), [OpOutput("mm", 2 * n + 1)]) for n in range(count)]
        asked = replace_part(plan, RecomputePart(groups=groups)) if groups else plan
        trace = super().__call__(program, asked, quiet=quiet).trace
        self.asked[-1] = program, plan
        meta = msgspec.structs.replace(trace.meta, regions=regions)
        trace = replace(trace, strings=[*trace.strings, "inductor.triton_0"], meta=meta)
        return Captured(trace, estimate(trace, self.profile))


def replace_part(plan: Plan | None, part: RecomputePart) -> Plan:
    return msgspec.structs.replace(plan or Plan(), recompute=part)


@pytest.fixture
def program(tmp_path: Path) -> ScriptTarget:
    script = tmp_path / "train.py"
    script.write_text("")
    return ScriptTarget("script", str(script), ())


def test_the_least_recomputation_that_fits(program: ScriptTarget, tmp_path: Path) -> None:
    job = CompiledChain(find_profile("2800MiB"))
    fitted = fit(program, job.profile, job, Greedy())
    answer, plan = fitted.answer, fitted.plan
    assert answer.fits and not answer.before.fits
    assert plan is not None and plan.regions is not None and plan.recompute is None
    shares = [asked.regions.share for _, asked in job.asked if asked and asked.regions]
    assert shares[0] == 1 and len(shares) == len(answer.attempts) <= 5
    fitting = [one for one in answer.attempts if one.fits]
    assert answer.added_fraction == min(one.added_fraction for one in fitting)
    assert len(plan.regions.regions[0].recomputed) < 11  # less than the least peak takes
    again = job(program, plan)  # as a run has it
    assert again.estimate.allocated_peak_bytes == plan.regions.peak_bytes
    assert answer.after is not None
    assert answer.after.allocated_peak_bytes == plan.regions.peak_bytes
    text = "\n".join(line.plain for line in fit_lines(answer))
    assert "compiled at train.py:7" in text
    save_plan(plan, tmp_path / "job.plan")
    assert load_plan(tmp_path / "job.plan") == plan


def test_blocks_that_are_compiled_by_themselves(program: ScriptTarget) -> None:
    """The least peak of each is not enough: they are all there at once."""
    job = CompiledChain(find_profile("2800MiB"), alone=2)
    fitted = fit(program, job.profile, job, Greedy())
    assert fitted.answer.fits and fitted.plan is not None and fitted.plan.regions is not None
    assert 2 < len(fitted.plan.regions.regions[0].recomputed) < 11


def test_values_outside_come_on_top_where_that_is_not_enough(program: ScriptTarget) -> None:
    job = CompiledChain(find_profile("2000MiB"))
    answer = fit(program, job.profile, job, Greedy()).answer
    assert not answer.fits
    plans = [plan for _, plan in job.asked if plan is not None and plan.recompute is not None]
    assert plans and all(plan.regions and plan.regions.regions for plan in plans)


def test_what_is_not_compiled_is_asked_for_nothing(program: ScriptTarget) -> None:
    job = ChainProgram(find_profile("2600MiB"))
    assert fit(program, job.profile, job, Greedy()).answer.fits
    assert not [plan for _, plan in job.asked if plan is not None and plan.regions is not None]
