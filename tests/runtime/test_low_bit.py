"""Moments in 8 bits: training goes on as well. By torchao's arithmetic, which is not compiled."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.runtime.in_effect import plan_in_effect
from memplan.runtime.low_bit import LowBit
from memplan.runtime.optimizer_in_backward import preconditions, updates
from memplan.types.plan import LowBitPart, OrderPart, Plan

Make = Callable[[Any], optim.Optimizer]
MAKES: dict[str, Make] = {
    "adamw": lambda p: optim.AdamW(p, 3e-3, foreach=True),
    "fused": lambda p: optim.AdamW(p, 3e-3, fused=True),
    "adam": lambda p: optim.Adam(p, 3e-3, weight_decay=1e-3),
}
WIDTH, INNER = 64, 128


@pytest.fixture(autouse=True)
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(function: Callable[..., Any], **_options: object) -> Callable[..., Any]:
        assert not _get_current_dispatch_mode_stack(), "torch.compile refuses these"
        return function

    monkeypatch.setattr(torch, "compile", compiles)


class Job:
    """A small regression."""

    def __init__(self, make: Make = MAKES["adamw"]) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
        self.optimizer = make(self.model.parameters())
        self.data = torch.randn(256, WIDTH)
        self.said: list[str] = []

    def loss(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.data), self.data.roll(1, 1) / 2)
        loss.backward()
        return loss

    def steps(self, count: int) -> float:
        for _ in range(count):
            loss = self.loss()
            self.optimizer.step()
        return loss.item()

    def moments(self) -> Iterator[Tensor]:
        for state in self.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step")

    def kinds(self) -> list[str]:
        return [type(value).__name__ for value in self.moments()]


EIGHT_BITS = ["OptimState8bit"] * 2 + ["Tensor"] * 2
"""Of a layer: weight and bias."""


@pytest.mark.parametrize("name", MAKES)
def test_it_trains_as_well(name: str) -> None:
    plain, job = Job(MAKES[name]), Job(MAKES[name])
    with LowBit(job.said.append):
        found = job.steps(20)
    expected = plain.steps(20)
    assert not job.said and sorted(job.kinds()) == sorted(2 * EIGHT_BITS)
    assert found == pytest.approx(expected, rel=0.05) and found < 0.5 * plain.data.var().item() / 4
    assert all(one.grad is not None for one in job.model.parameters())
    assert set(plain.optimizer.param_groups[0]) == set(job.optimizer.param_groups[0])


def test_a_byte_a_moment_and_a_scale_for_each_256() -> None:
    job = Job()
    with LowBit():
        job.steps(1)
    elements = WIDTH * INNER
    for layer in ("0.weight", "2.weight"):
        state = job.optimizer.state[job.model.get_parameter(layer)]
        for name in ("exp_avg", "exp_avg_sq"):
            sizes = [getattr(state[name], part).nbytes for part in ("codes", "scale", "qmap")]
            assert sizes == [elements, elements // 256 * 4, 256 * 4]


def test_a_step_with_a_closure_and_a_scheduler() -> None:
    plain, job = Job(), Job()
    closure: Any = job.loss
    schedulers = [optim.lr_scheduler.LinearLR(one.optimizer, 1, 0.5, 4) for one in (plain, job)]
    for _ in range(4):
        plain.steps(1)
        with LowBit(job.said.append):
            loss = job.optimizer.step(closure)
        for scheduler in schedulers:
            scheduler.step()
    assert not job.said and loss is not None
    assert job.kinds().count("OptimState8bit") == 4
    rates = [one.optimizer.param_groups[0]["lr"] for one in (plain, job)]
    assert rates[0] == rates[1] == pytest.approx(1.5e-3) and type(rates[1]) is float
    assert job.loss().item() == pytest.approx(plain.loss().item(), rel=0.01)


def saved(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    file = io.BytesIO()
    torch.save((job.model.state_dict(), job.optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    return weights, state


def test_a_checkpoint_goes_on_to_the_bit() -> None:
    job, other = Job(), Job()
    with LowBit():
        job.steps(3)
        weights, state = saved(job)
        other.model.load_state_dict(weights)
        other.optimizer.load_state_dict(state)
        assert job.steps(3) == other.steps(3)
    assert job.kinds() == other.kinds()


def test_moments_of_a_plain_run_become_ones_of_8_bits() -> None:
    job, other = Job(), Job()
    job.steps(10)
    weights, state = saved(job)
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(state)
    with LowBit():
        found = other.steps(5)
    assert found == pytest.approx(job.steps(5), rel=0.02)
    assert other.kinds().count("OptimState8bit") == 4


class _OwnAdamW(optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: optim.SGD(p, 1e-2, momentum=0.9), "SGD is not Adam or AdamW of torch.optim"),
        (lambda p: _OwnAdamW(p), "_OwnAdamW is not Adam or AdamW"),
        (lambda p: optim.AdamW(p, amsgrad=True), "torchao has no AdamW with amsgrad=True"),
        (lambda p: optim.Adam(p, maximize=True), "torchao has no Adam with maximize=True"),
        (lambda p: optim.Adam(p, torch.tensor(1e-3)), "a hyperparameter of the optimizer is a"),
    ],
)
def test_other_optimizers_step_as_they_are(make: Make, reason: str) -> None:
    plain, job = Job(make), Job(make)
    with LowBit(job.said.append):
        found = job.steps(3)
    assert found == plain.steps(3)
    [said] = job.said
    assert said.startswith(f"an optimizer's state is not in 8 bits: {reason}")


def test_a_fused_step_that_unscales_is_left_alone() -> None:
    jobs = [Job(MAKES["fused"]), Job(MAKES["fused"])]
    for job, lever in zip(jobs, (LowBit(jobs[0].said.append), None), strict=True):
        scaler = torch.amp.GradScaler("cpu")
        if lever is not None:
            lever.__enter__()
        for _ in range(3):
            job.optimizer.zero_grad()
            loss = nn.functional.mse_loss(job.model(job.data), job.data)
            scaler.scale(loss).backward()
            scaler.step(job.optimizer)
            scaler.update()
        if lever is not None:
            lever.__exit__()
    assert "divides gradients by the scaler's scale itself" in jobs[0].said[0]
    assert jobs[0].loss().item() == jobs[1].loss().item()


@pytest.mark.parametrize("since", ["hook", "group", "scaler"])
def test_what_an_optimizer_gets_later_is_seen(since: str) -> None:
    """Its state is then that of a plain run again."""
    job = Job(MAKES["fused" if since == "scaler" else "adamw"])
    seen: list[bool] = []
    with LowBit(job.said.append):
        job.steps(2)
        if since == "hook":
            job.optimizer.register_step_post_hook(
                lambda *_: seen.append(all(p.grad is not None for p in job.model.parameters()))
            )
        elif since == "group":
            job.optimizer.add_param_group(
                {"params": [nn.Parameter(torch.ones(3))], "maximize": True}
            )
        job.loss()
        if since == "scaler":
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.full((), torch.inf, requires_grad=True)).backward()
            for parameter in job.model.parameters():
                parameter.grad = torch.full_like(parameter, torch.inf)
            before = job.model.get_parameter("0.weight").detach().clone()
            scaler.step(job.optimizer)
            assert torch.equal(job.model.get_parameter("0.weight"), before), "skipped"
        else:
            job.optimizer.step()
    assert len(job.said) == 1 and set(job.kinds()) == {"Tensor"}
    assert seen == [True] * (since == "hook")


@pytest.mark.parametrize("name", MAKES)
def test_plain_steps_afterwards(name: str) -> None:
    """They begin with the values that the moments in 8 bits have."""
    plain, job = Job(MAKES[name]), Job(MAKES[name])
    with LowBit(job.said.append):
        job.steps(3)
    weights, state = saved(job)
    for moments in state["state"].values():
        for key, value in moments.items():
            moments[key] = getattr(value, "dequantize", lambda value=value: value)()
    plain.model.load_state_dict(weights)
    plain.optimizer.load_state_dict(state)
    assert job.steps(3) == plain.steps(3)
    assert set(job.kinds()) == {"Tensor"} and not job.said
    with LowBit():
        job.steps(1)
    assert job.kinds().count("OptimState8bit") == 4


def test_what_is_said_of_updates_at_the_step_is_true() -> None:
    said: list[str] = []
    for low_bit in (None, LowBitPart()):
        order = OrderPart(parameters=4, gradient_bytes=0, from_first=False)
        with plan_in_effect(
            Plan(low_bit=low_bit, order=order), [], lambda _, text: said.append(text)
        ):
            job = Job()
            job.loss()
            job.steps(1)
        assert ("This changes no number" in said.pop()) == (low_bit is None) and not said


def test_a_state_is_copied() -> None:
    job = Job()
    with LowBit():
        job.steps(1)
        kept = copy.deepcopy(job.optimizer.state_dict())
        expected = job.steps(2)
        job.optimizer.load_state_dict(kept)
    again = Job()
    with LowBit():
        again.steps(1)
        again.optimizer.load_state_dict(kept)
        assert again.steps(2) == expected


def test_without_torchao_the_run_goes_on_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    plain, job = Job(), Job()
    with plan_in_effect(Plan(low_bit=LowBitPart()), [], lambda _, text: job.said.append(text)):
        found = job.steps(3)
    assert found == plain.steps(3)
    assert len(job.said) == 1 and job.said[0].endswith("pip install torchao")


@pytest.mark.parametrize("from_first", [True, False])
def test_with_updates_in_backward(from_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "reads_gradients", lambda: "")  # this file does
    monkeypatch.setattr(preconditions, "has_compiled", lambda: False)  # another test may have
    alone, said = Job(), list[str]()
    order = OrderPart(parameters=4, gradient_bytes=0, from_first=from_first)
    with plan_in_effect(
        Plan(low_bit=LowBitPart(), order=order), [], lambda _, text: said.append(text)
    ) as found:
        job = Job()
        together = job.steps(6)
    with LowBit():
        assert together == alone.steps(6)
    assert not said and job.kinds().count("OptimState8bit") == 4
    assert found.in_backward is not None and found.in_backward.steps


def test_bf16_weights_are_rounded_stochastically() -> None:
    """A step smaller than half of what bf16 tells apart moves the mean of the weights all the
    same."""

    def moved() -> float:
        weight = nn.Parameter(torch.ones(2**14, dtype=torch.bfloat16))
        optimizer = optim.AdamW([weight], 1e-3, weight_decay=0.0)
        for _ in range(8):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return 1 - weight.detach().float().mean().item()

    assert moved() == 0
    with LowBit():
        torch.manual_seed(0)
        assert moved() == pytest.approx(8e-3, rel=0.2)
