"""A loss with a gradient in it: what only the last backward goes through is recomputed or
sent to the host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.session import CaptureSession
from memplan.estimation import estimate
from memplan.fit.offload import OffloadPlanner
from memplan.fit.plans import Planner
from memplan.fit.search import Search
from memplan.fit.state import Job, first_state
from memplan.phases import step_graph
from memplan.phases.passes import differentiated_bytes, step_passes
from memplan.recompute.solve import Solver
from memplan.runtime.apply import AppliedEverywhere
from memplan.types.device import find_profile
from memplan.types.plan import Plan
from memplan.worker.captures import Captured
from tests.capturing.jobs import record
from tests.fit.chain_job import capturing
from tests.fit.test_two_optimizers import network


def penalty(critic: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    x = real.lerp(made, torch.rand(len(real), 1, device=real.device)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (slope.norm(2, 1) - 1).square().mean()


def train(device: str, width: int, batch: int, steps: int, penalty_first: bool) -> list[float]:
    """A critic with a gradient penalty."""
    torch.manual_seed(0)
    critic = network(64, width, 1).to(device)
    optimizer = torch.optim.Adam(critic.parameters())
    losses = []
    for _ in range(steps):
        real, made = (torch.randn(batch, 64, device=device) for _ in range(2))
        loss = penalty(critic, real, made) if penalty_first else 0
        loss = loss + critic(made).mean() - critic(real).mean()
        loss = loss if penalty_first else loss + penalty(critic, real, made)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def critic_job(tmp_path: Path, penalty_first: bool) -> Job:
    script = tmp_path / "train.py"
    script.write_text("")
    profile = find_profile("2050MiB")

    @capturing
    def capture(program: ScriptTarget, plan: Plan | None) -> Captured:
        said: list[str] = []
        recompute, offload = (plan.recompute, plan.offload) if plan else (None, None)
        with (
            CaptureSession(CaptureOptions(profile=profile)) as session,
            AppliedEverywhere(recompute, said.append, offload),
        ):
            with suppress(EnoughSeen):
                train("cuda", 1024, 8192, 16, penalty_first)
            trace = session.trace()
        assert said == []  # every value of the plan was met
        return Captured(trace, estimate(trace, profile))

    return Job(ScriptTarget("script", str(script), ()), profile, capture, Search())


@pytest.mark.parametrize("penalty_first", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_a_critic_with_a_gradient_penalty(
    tmp_path: Path, penalty_first: bool, offloads: bool
) -> None:
    job = critic_job(tmp_path, penalty_first)
    base = first_state(job, job.capture(job.program))
    if offloads:
        graph = step_graph(base.captured.trace, job.profile)
        end = OffloadPlanner(base, graph).search(None)
    else:
        found = Planner(base, Solver()).search()
        end = found.state if found else None
    assert end is not None and not base.fits and end.fits
    plan = end.promised()
    assert plan.recompute is not None and (plan.offload is not None) == offloads
    values = [value for group in plan.recompute.groups for value in group.drop]
    values += plan.offload.values if plan.offload else []
    assert {value.call for value in values} == {0, 1, 2} - {0 if penalty_first else 2}
    again = job.capture(job.program, plan)
    assert again.estimate.allocated_peak_bytes == (plan.offload or plan.recompute).peak_bytes
    assert differentiated_bytes(again.trace) > 1 << 28

    plain = train("cpu", 16, 4, 3, penalty_first)
    notes: list[str] = []
    with AppliedEverywhere(plan.recompute, notes.append, plan.offload, devices=("cpu",)):
        assert train("cpu", 16, 4, 3, penalty_first) == plain
    assert not notes


def test_a_gradient_within_a_call_is_left_alone() -> None:
    """What a call runs after it has numbers that a run does not give it."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = network(64, 256, 1), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return torch.as_tensor(self.scale(force).tanh())

    def job() -> None:
        model = Energy().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.randn(512, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert len(step_passes(record(job)).passes) == 2
