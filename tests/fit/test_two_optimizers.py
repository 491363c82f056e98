"""A step with passes that are unlike, as of a GAN, is made to fit: each kind of pass is planned."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.session import CaptureSession
from memplan.estimation import estimate
from memplan.fit.flow import fit
from memplan.phases import plain_peak, step_graphs
from memplan.recompute.solve import Solver
from memplan.runtime.apply import AppliedEverywhere
from memplan.types.device import find_profile
from memplan.types.plan import Plan
from memplan.worker.captures import Captured
from tests.fit.chain_job import capturing, not_captured


def network(features: int, width: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(features, width), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def train(device: str, width: int, batch: int, steps: int, every: int) -> list[float]:
    """The discriminator steps first, the generator after each `every` of its steps."""
    torch.manual_seed(0)
    generator, judge = (network(n, width, m).to(device) for n, m in ((16, 64), (64, 1)))
    of_generator = torch.optim.Adam(generator.parameters())
    of_judge = torch.optim.Adam(judge.parameters())
    loss = nn.BCEWithLogitsLoss()
    one, zero = torch.ones(batch, 1, device=device), torch.zeros(batch, 1, device=device)
    losses = []
    for step in range(steps):
        of_judge.zero_grad()
        with torch.no_grad():
            made = generator(torch.randn(batch, 16, device=device))
        real = torch.randn(batch, 64, device=device)
        error = loss(judge(real), one) + loss(judge(made), zero)
        error.backward()
        of_judge.step()
        losses.append(error.item())
        if step % every:
            continue
        of_generator.zero_grad()
        error = loss(judge(generator(torch.randn(batch, 16, device=device))), one)
        error.backward()
        of_generator.step()
        losses.append(error.item())
    return losses


@pytest.mark.parametrize("every", [1, 3])
def test_both_networks_of_a_gan_are_planned(tmp_path: Path, every: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    program, profile = ScriptTarget("script", str(script), ()), find_profile("1550MiB")

    @capturing
    def capture(program: ScriptTarget, plan: Plan | None) -> Captured:
        if plan is not None and (plan.state or plan.offload):
            raise not_captured("recomputation alone is looked at")
        said: list[str] = []
        part = plan.recompute if plan else None
        with (
            CaptureSession(CaptureOptions(profile=profile)) as session,
            AppliedEverywhere(part, said.append),
        ):
            with suppress(EnoughSeen):
                train("cuda", 1024, 8192, 16, every)
            trace = session.trace()
        assert said == []  # every value of the plan was met, from the first step on
        return Captured(trace, estimate(trace, profile))

    fitted = fit(program, profile, capture, Solver())
    answer = fitted.answer
    assert not answer.before.fits and answer.fits
    assert answer.added_fraction < 0.05
    apart = (
        "step begins before the last backward pass"
        if every == 1
        else "weights are updated in other steps"
    )
    assert any(apart in note for note in answer.notes)
    assert fitted.plan is not None and fitted.plan.recompute is not None
    part = fitted.plan.recompute
    judged = ["Sequential", "BCEWithLogitsLoss"] * 2
    made = ["Sequential#1", "Sequential", "BCEWithLogitsLoss"]
    assert sorted(part.kinds) == [judged, made]
    roots = [root for kind in part.kinds for root in kind]
    dropped = Counter(roots[value.call] for group in part.groups for value in group.drop)
    assert set(dropped) == {"Sequential", "Sequential#1"}
    again = capture(program, fitted.plan)
    assert again.estimate.allocated_peak_bytes == part.peak_bytes
    peaks = [plain_peak(graph) for graph in step_graphs(again.trace, profile, 0)]
    assert len(peaks) == 2 and max(peaks) == again.estimate.requested_peak_bytes
    for attempt in answer.attempts:
        assert attempt.planned_bytes >= 0.98 * attempt.requested_bytes

    plain = train("cpu", 16, 4, 3, every)
    with AppliedEverywhere(part):
        assert train("cpu", 16, 4, 3, every) == plain
