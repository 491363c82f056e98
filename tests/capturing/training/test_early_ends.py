"""A capture that ends early answers no less than the same job run on, or says why it may."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import nn

from memplan.capturing.training import watcher as steps_module
from memplan.estimation import estimate
from memplan.report.memory_viz import memory_viz_snapshot
from memplan.simulate import AllocatorSettings, replay_report, settled, simulate
from tests.capturing.jobs import record

LONG = 10
MIB = 1 << 20
BLOCK = 2 * MIB
"""Of the least pool: what a tensor of a few bytes may cost."""
SAID = {"growth", "steady-step", "steady-state", "optimizer"}


@dataclass(frozen=True)
class Loop:
    """What a training loop does."""

    widths: tuple[int, ...]
    rows: int
    accumulation: int
    in_flight: int
    """Forwards before the first backward, as a pipeline's warm-up."""
    optimizer: str
    zero: str
    second_every: int
    """Steps of the first optimizer for one of the second; 0: there is none."""
    transforms: bool
    evaluate_first: int
    evaluate_each: int
    clip: bool
    average: bool
    amp: bool
    warm_up: bool
    hold: str
    grows: int
    """Bytes that each step keeps."""


LOOPS = st.builds(
    Loop,
    widths=st.lists(st.sampled_from([600, 1024, 1500, 3000]), min_size=2, max_size=4).map(tuple),
    rows=st.sampled_from([64, 700, 2048, 4096]),
    accumulation=st.sampled_from([1, 1, 2, 3, 17, 40]),
    in_flight=st.integers(1, 6),
    optimizer=st.sampled_from(["sgd", "momentum", "adamw", "adamw one by one", "adagrad"]),
    zero=st.sampled_from(["after", "before", "in place", "before the backward"]),
    second_every=st.sampled_from([0, 0, 0, 1, 2, 5, 6]),
    transforms=st.booleans(),
    evaluate_first=st.sampled_from([0, 0, 1, 30]),
    evaluate_each=st.sampled_from([0, 0, 2]),
    clip=st.booleans(),
    average=st.booleans(),
    amp=st.booleans(),
    warm_up=st.booleans(),
    hold=st.sampled_from(["", "loss", "output"]),
    grows=st.sampled_from([0, 0, 0, 4, 3 * MIB]),
)  # fmt: skip


def network(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in zip(widths, (*widths[1:], widths[0]), strict=True):
        layers += [nn.Linear(width, following), nn.GELU()]
    return nn.Sequential(*layers).cuda()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters)
    if kind.startswith("adamw"):
        return torch.optim.AdamW(parameters, foreach=kind == "adamw")
    return torch.optim.SGD(parameters, 0.1, momentum=0.9 if kind == "momentum" else 0.0)


def job(loop: Loop) -> Callable[[], None]:
    def run() -> None:
        model = network(loop.widths)
        optimizer = optimizer_of(loop.optimizer, model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        other = network(loop.widths[:1])
        second = optimizer_of("adamw", other) if loop.second_every else None
        average = copy.deepcopy(model) if loop.average else None
        transform = nn.Sequential(nn.Dropout(0.1), nn.Identity())
        scaler = torch.amp.GradScaler("cuda", enabled=loop.amp)
        kept: list[torch.Tensor] = []
        held: dict[str, torch.Tensor] = {}

        def batch() -> torch.Tensor:
            x = torch.zeros(loop.rows, loop.widths[0])
            if loop.transforms:
                for _ in range(20):
                    transform(x[:1])
            return x.cuda()

        def forward() -> torch.Tensor:
            with torch.autocast("cuda", torch.float16, enabled=loop.amp):
                output = model(batch())
                loss = output.square().mean()
            held.update({"loss": loss} if loop.hold == "loss" else {})
            held.update({"output": output.detach()} if loop.hold == "output" else {})
            return scaler.scale(loss)

        def evaluate(times: int) -> None:
            model.eval()
            with torch.no_grad():
                for _ in range(times):
                    model(batch())
            model.train()

        evaluate(loop.evaluate_first)
        for step in range(1000):
            if loop.zero == "before":
                optimizer.zero_grad()
            flight: list[torch.Tensor] = []
            for micro in range(loop.accumulation):
                flight.append(forward())
                if loop.zero == "before the backward" and micro == 0:
                    optimizer.zero_grad()
                if len(flight) >= loop.in_flight:
                    flight.pop(0).backward()
            while flight:
                flight.pop(0).backward()
            if loop.clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if loop.zero in ("after", "in place"):
                optimizer.zero_grad(set_to_none=loop.zero == "after")
            if loop.warm_up:
                scheduler.step()
            if second is not None and step % loop.second_every == loop.second_every - 1:
                other(batch()).sum().backward()
                second.step()
                second.zero_grad()
            if average is not None:
                with torch.no_grad():
                    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(now, 0.01)
            if loop.grows:
                kept.append(torch.zeros(loop.grows, dtype=torch.uint8, device="cuda"))
            evaluate(loop.evaluate_each)

    return run


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(loop=LOOPS, long_step=st.sampled_from([50, 20_000]))
def test_never_less_than_the_job_run_on(loop: Loop, long_step: int) -> None:
    check(loop, long_step)


def check(loop: Loop, long_step: int) -> None:
    with mock.patch.object(steps_module, "_LONG_STEP", long_step):
        early = record(job(loop))
    event(f"{early.meta.optimizer_steps} steps")
    assert early.meta.optimizer_steps >= 2
    steady = settled(early, AllocatorSettings())
    answer = simulate(steady.trace)
    said = {item.kind for item in early.meta.assumptions}
    said |= {"steady-state"} if steady.unsettled else set()
    if loop.grows >= BLOCK:
        assert said & SAID
    if said & SAID:
        return
    truth = simulate(record(job(loop), steps=max(LONG, early.meta.optimizer_steps + 1)))
    assert answer.reserved_peak_bytes >= truth.reserved_peak_bytes - BLOCK
    assert answer.requested_peak_bytes >= truth.requested_peak_bytes - BLOCK
    assert answer.reserved_peak_bytes <= truth.reserved_peak_bytes * 1.05 + BLOCK


def test_what_the_third_step_fragments_is_foreseen_from_two() -> None:
    loop = Loop(
        widths=(1500, 1024, 1024, 600),
        rows=2048,
        accumulation=2,
        in_flight=1,
        optimizer="adamw",
        zero="after",
        second_every=0,
        transforms=False,
        evaluate_first=0,
        evaluate_each=0,
        clip=False,
        average=False,
        amp=True,
        warm_up=False,
        hold="loss",
        grows=0,
    )
    with mock.patch.object(steps_module, "_LONG_STEP", 50):
        early = record(job(loop))
    assert early.meta.optimizer_steps == 2
    answer = estimate(early)
    truth = simulate(record(job(loop), steps=20)).reserved_peak_bytes
    assert simulate(early).reserved_peak_bytes < truth == answer.reserved_peak_bytes
    assert answer.repeated_steps == 1 and answer.steps == 2
    assert sum(nbytes for _, nbytes in answer.breakdown.items()) == answer.peak_bytes
    assert max(answer.curve.reserved_bytes) == truth
    assert any("1 step more than were captured" in note for note in answer.notes)
    assert replay_report(early)["reserved_peak_bytes"] == truth
    viewed = memory_viz_snapshot(early)
    assert sum(segment["total_size"] for segment in viewed["segments"]) == truth
