"""Loops that update their weights themselves train too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memplan.phases.optimizer_in_backward import updates_in_backward
from memplan.phases.passes import step_passes
from memplan.phases.steps import find_steps
from tests.capturing.jobs import record

RATE = 1e-3


def data_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.data.add_(p.grad, alpha=-RATE)


def below_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.sub_(RATE * p.grad)


def multi_tensor(model: nn.Module) -> None:
    weights = [p.data for p in model.parameters()]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_add_(weights, grads, alpha=-RATE)


def with_momentum(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            if not hasattr(p, "velocity"):
                p.velocity = torch.zeros_like(p)  # type: ignore[attr-defined]
            p.velocity.mul_(0.9).add_(p.grad)  # type: ignore[attr-defined]
            p.copy_(p - RATE * p.velocity)  # type: ignore[attr-defined]


def new_weights(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.data = p.data - RATE * p.grad


def loop(update: Callable[[nn.Module], None], rounds: int = 20, micro: int = 1) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    for _ in range(rounds):
        for _ in range(micro):
            model(torch.randn(16, 64, device="cuda")).sum().backward()
        update(model)
        model.zero_grad()


@pytest.mark.parametrize(
    "update", [data_in_place, below_no_grad, multi_tensor, with_momentum, new_weights]
)
def test_a_loop_that_updates_by_hand_ends_when_it_repeats(
    update: Callable[[nn.Module], None],
) -> None:
    trace = record(lambda: loop(update))
    assert 2 <= trace.meta.optimizer_steps <= 5
    assert "asked for the same memory" in trace.meta.stop_reason


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("update", [data_in_place, below_no_grad, new_weights])
def test_a_step_is_whole(update: Callable[[nn.Module], None], micro: int) -> None:
    """From its forward to its update, though only the next forward tells that one was made."""
    trace = record(lambda: loop(update, micro=micro))
    steps = find_steps(trace)
    assert steps.steady is not None
    found = step_passes(trace)
    assert len(found.passes) == micro
    rows = trace.ops.event < found.passes[0].first_event
    rows &= trace.ops.event >= found.start
    assert {trace.strings[name] for name in trace.ops.name[rows]} <= {"aten.randn.default"}
    assert "no optimizer of PyTorch's" in updates_in_backward(trace).reason


class UpdatesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> None:
        self.inner(x).sum().backward()
        below_no_grad(self.inner)
        self.inner.zero_grad()


def test_a_module_that_updates_itself() -> None:
    def job() -> None:
        module = UpdatesItself().cuda()
        for _ in range(2):
            module(torch.randn(16, 64, device="cuda"))

    assert record(job).meta.optimizer_steps == 2


def on_the_host(model: nn.Module, back: str = "cpu") -> None:
    """As `scipy.optimize.minimize` has it: gradients go to the host, weights come back."""
    for p in model.parameters():
        assert p.grad is not None
        p.data.copy_((p.detach().cpu() - RATE * p.grad.cpu()).to(back))


@pytest.mark.parametrize("back", ["cpu", "cuda"])
def test_weights_that_the_host_computes_are_an_update(back: str) -> None:
    trace = record(lambda: loop(lambda model: on_the_host(model, back), micro=2))
    assert 2 <= trace.meta.optimizer_steps <= 5
    assert "asked for the same memory" in trace.meta.stop_reason


def test_the_last_update_counts() -> None:
    assert record(lambda: loop(data_in_place, rounds=1)).meta.optimizer_steps == 1


def test_accumulated_gradients_are_no_update() -> None:
    trace = record(lambda: loop(data_in_place, rounds=1, micro=5))
    assert trace.meta.optimizer_steps == 1
    assert record(lambda: loop(lambda _model: None, rounds=3)).meta.optimizer_steps == 0


def test_without_modules() -> None:
    def job() -> None:
        weight = torch.randn(64, 64, device="cuda", requires_grad=True)
        for _ in range(20):
            (torch.randn(8, 64, device="cuda") @ weight).sum().backward()
            with torch.no_grad():
                assert weight.grad is not None
                weight.sub_(RATE * weight.grad)
                weight.grad = None

    assert 2 <= record(job).meta.optimizer_steps <= 5


def test_only_steps_of_an_optimizer_count_where_there_is_one() -> None:
    def job() -> None:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            for _ in range(4):  # weights nudged in every micro-batch
                model(torch.randn(16, 64, device="cuda")).sum().backward()
                data_in_place(model)
            optimizer.step()
            optimizer.zero_grad()

    assert record(job, steps=3).meta.optimizer_steps == 3
