"""A pipeline stage is made to fit by recomputation, planned beside the micro-batches in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining import Schedule1F1B

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.fit.flow import fit
from memplan.phases import plain_peak, step_graph
from memplan.recompute.solve import Solver
from memplan.types.device import find_profile
from memplan.types.plan import Plan
from memplan.worker.captures import Captured
from tests.fit.chain_job import capturing, not_captured
from tests.phases import test_in_flight
from tests.phases.test_in_flight import captured


def test_a_stage_is_made_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_in_flight, "ROWS", 8192)
    script = tmp_path / "train.py"
    script.write_text("")
    profile = find_profile("2100MiB")

    @capturing
    def capture(program: ScriptTarget, plan: Plan | None) -> Captured:
        if plan is not None and (plan.state or plan.offload or plan.loss or plan.low_bit):
            raise not_captured("recomputation alone is looked at")
        trace = captured(Schedule1F1B, 0, part=plan.recompute if plan else None)
        return Captured(trace, estimate(trace, profile))

    fitted = fit(ScriptTarget("script", str(script), ()), profile, capture, Solver())
    answer = fitted.answer
    assert not answer.before.fits and answer.fits
    assert {lever.kind for lever in answer.levers} <= {"allocator", "recompute"}
    assert fitted.plan is not None and fitted.plan.recompute is not None
    assert fitted.plan.recompute.calls == 1
    again = capture(ScriptTarget("script", str(script), ()), fitted.plan)
    assert again.estimate.allocated_peak_bytes == fitted.plan.recompute.peak_bytes
    for attempt in answer.attempts:
        assert attempt.planned_bytes == pytest.approx(attempt.requested_bytes, rel=0.02)
    assert plain_peak(step_graph(again.trace)) == pytest.approx(
        again.estimate.requested_peak_bytes, rel=0.02
    )
