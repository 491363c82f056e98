"""An optimizer's step in buckets: the same bits, whatever the optimizer and the loop do, and less
memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memplan.runtime.step_in_buckets as step_in_buckets
import memplan.runtime.update_by_pieces as update_by_pieces
from memplan.capturing.patches.job_observer import JobObserver
from memplan.phases.optimizer_in_backward import peak_of_update
from memplan.runtime import one_update
from memplan.runtime.in_effect import plan_in_effect
from memplan.runtime.step_in_buckets import StepInBuckets
from memplan.types.plan import Plan, StatePart, StepPart
from tests.capturing.jobs import record
from tests.runtime.test_host_state import OPTIMIZERS, Job, Make, same, small_pieces

__all__ = ["small_pieces"]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest weight, of 9,100 elements, goes by pieces, and the others two by two."""
    monkeypatch.setattr(step_in_buckets, "ELEMENTS", 5_400)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters are updated at once, in order; 0 for one by pieces."""
    found: list[int] = []
    real, by_pieces = one_update.update, update_by_pieces.update_by_pieces

    def update(optimizer: Any, group: Any, *parameters: Tensor) -> None:
        found.append(len(parameters))
        real(optimizer, group, *parameters)

    def pieces(*arguments: Any) -> None:
        found.append(0)
        by_pieces(*arguments)

    monkeypatch.setattr(step_in_buckets, "update", update)
    monkeypatch.setattr(step_in_buckets, "update_by_pieces", pieces)
    return found


def in_buckets(make: Make) -> Job:
    job = Job(make, plainly=True)
    job.lever = StepInBuckets(job.said.append)  # type: ignore[assignment]
    return job


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits(name: str, updates: list[int]) -> None:
    make = OPTIMIZERS[name]
    found = in_buckets(make).run(accumulate=2, clip=True)
    assert same(found, Job(make, plainly=True).run(accumulate=2, clip=True))
    assert not found.said
    assert updates == ([] if name == "fused" else [2, 0, 2] * 4)
    assert len(found.optimizer.state) == (0 if name == "plain sgd" else 5)


def test_beside_state_on_the_host(updates: list[int]) -> None:
    make = OPTIMIZERS["adamw"]
    found, other = Job(make, share=0.4), StepInBuckets()
    with other:  # told before or after the other lever: each parameter is updated once
        found.run()
    assert same(found, Job(make, plainly=True).run())
    assert found.on_host() and sum(updates) + updates.count(0) == 5 * 4


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: optim.Adafactor(p), "not known to update each parameter by itself"),
        (lambda p: optim.AdamW(p, torch.tensor(1e-2)), "hyperparameter of the optimizer is a"),
    ],
)
def test_an_optimizer_that_cannot_be_taken_apart(
    make: Make, reason: str, updates: list[int]
) -> None:
    found = in_buckets(make).run()
    assert reason in found.said[0] and len(found.said) == 1 and not updates
    assert same(found, Job(make, plainly=True).run())


def test_a_gradient_that_is_laid_out_differently(updates: list[int]) -> None:
    """Then PyTorch's foreach operators go through the whole list in another way."""
    jobs = [in_buckets(OPTIMIZERS["adamw"]), Job(OPTIMIZERS["adamw"], plainly=True)]
    for job in jobs:
        job.run(1)
        weight = job.model.get_parameter("0.weight")
        weight.grad = torch.ones(weight.shape[::-1]).t()
        with job.lever or StepInBuckets():
            job.optimizer.step()
    assert "laid out in another way" in jobs[0].said[0]
    assert same(*jobs) and updates == [2, 0, 2]


def test_weights_that_share_memory(updates: list[int]) -> None:
    """As `head.weight.data = embedding.weight.data` makes them: each is decayed before either is
    updated."""
    found: list[Tensor] = []
    said: list[str] = []
    for lever in (None, StepInBuckets(said.append)):
        weights = [nn.Parameter(torch.linspace(-1, 1, 5_000)) for _ in range(2)]
        weights[1].data = weights[0].data
        optimizer = optim.SGD(weights, 0.1, weight_decay=0.1, foreach=True)
        for weight in weights:
            weight.grad = torch.linspace(0, 1, 5_000)
        with lever or nullcontext():
            optimizer.step()
        found.append(weights[0].detach())
    assert "parameters share memory" in said[0] and not updates
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_on_the_cpu(dtype: torch.dtype, updates: list[int]) -> None:
    """There the last elements of a range are rounded in another way."""
    found: list[Tensor] = []
    for lever in (None, StepInBuckets()):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(9_100).to(dtype))
        optimizer = optim.SGD([weight], 0.1, momentum=0.9, weight_decay=0.1)
        with lever or nullcontext():
            for _ in range(5):
                weight.grad = torch.randn(9_100).to(dtype)
                optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found) and updates == [1] * 5


def test_a_compiled_step_is_left_whole(updates: list[int]) -> None:
    """Its arithmetic is the compiler's, also where a hook ends a graph."""
    job, observer = in_buckets(OPTIMIZERS["adamw"]), JobObserver()
    observer.on_steps(lambda _: torch._dynamo.graph_break())
    assert job.lever is not None
    with job.lever:
        for one in job.model.parameters():
            one.grad = torch.ones_like(one)
        torch.compile(job.optimizer.step, backend="eager")()
    observer.close()
    assert not updates and len(job.optimizer.state) == 5


def test_what_one_bucket_holds_is_left_whole(
    monkeypatch: pytest.MonkeyPatch, updates: list[int]
) -> None:
    """It is not even looked at: there is nothing to gain."""
    monkeypatch.setattr(step_in_buckets, "ELEMENTS", 14_572)  # all its elements
    job = in_buckets(lambda p: optim.AdamW(p, torch.tensor(1e-2))).run()
    assert not updates and not job.said


def test_a_closure(updates: list[int]) -> None:
    job = in_buckets(OPTIMIZERS["adamw"])
    assert job.lever is not None
    with job.lever:
        job.optimizer.step(lambda: 0.0)
    assert "closure" in job.said[0] and not updates


def test_an_error_in_a_step_leaves_gradients_where_they_were() -> None:
    job = in_buckets(OPTIMIZERS["adamw"])
    assert job.lever is not None
    last = list(job.model.parameters())[-1]
    with job.lever:
        job.model(torch.ones(2, 40)).square().mean().backward()
        job.optimizer.step()
        before = [parameter.grad for parameter in job.model.parameters()]
        job.optimizer.state[last]["exp_avg"] = torch.ones(1, 1, 1)
        with pytest.raises(RuntimeError):
            job.optimizer.step()
    assert all(p.grad is g for p, g in zip(job.model.parameters(), before, strict=True))


def test_temporaries_are_those_of_a_bucket() -> None:
    """Eight weights of 4 MiB: a step over all of them makes 32 MiB of square roots."""

    def job() -> None:
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 1024, device="cuda")).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def planned() -> None:
        with plan_in_effect(Plan(step=StepPart()), [], lambda _part, _text: None):
            job()

    whole, least = peak_of_update(record(job))
    assert whole - least == 32 << 20
    assert peak_of_update(record(planned))[0] == least + 4 * 5_400


def test_the_plan_says_what_is_left_whole() -> None:
    said: list[tuple[str, str]] = []
    model = nn.Linear(2, 3_000)
    optimizer = optim.Adafactor(model.parameters())
    plan = Plan(step=StepPart(), state=StatePart(share=1.0))
    with plan_in_effect(plan, [], lambda part, text: said.append((part, text))):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert {part for part, _ in said} == {"step", "state"}
