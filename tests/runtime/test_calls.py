"""How models are called: arguments, results, twice in a step, inside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memplan.runtime.tape import Decisions, Recording
from tests.runtime.harness import (
    Job,
    Spy,
    check,
    checkpointed,
    choices,
    everything,
    outcome,
    recorded,
)


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    nothing: None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return nn.functional.dropout(torch.sin(self.norm(self.layer(x)) * scale), 0.3) + x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(
        self, inputs: dict[str, Any], *rest: Tensor, mask: Tensor | None = None
    ) -> tuple[Any, ...]:
        x, hidden = inputs["x"][0], []
        for block in self.blocks:
            x = block(x, scale=2.0)
            hidden.append(x)
        if mask is not None:
            x = torch.exp(x * mask)
        return {"loss": x.square().mean() + rest[0].sum()}, Output(x, hidden), None, 3


def nested(model: Any) -> list[Any]:
    x, y = torch.randn(6, 8, requires_grad=True), torch.randn(2, requires_grad=True)
    losses, output, nothing, number = model({"x": [x]}, y, mask=torch.rand(6, 8))
    loss = losses["loss"] + output.hidden[1].exp().mean() + output.logits.sum()
    loss.backward()
    return [loss, x.grad, y.grad, nothing, number, *output.hidden]


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


def siamese(model: Any) -> list[Any]:
    x, y = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
    one, two = model(x), model(y)
    loss = (one - two).square().mean() + (one * one.exp() + one).mean()
    loss.backward()
    return [loss, x.grad]


def chained(model: Any) -> list[Any]:
    """The second call's input is the first one's result."""
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(model(x)).square().mean()
    loss.backward()
    return [loss, x.grad]


def accumulation(model: Any) -> list[Any]:
    losses = []
    for _ in range(3):
        loss = model(torch.randn(6, 8)).square().mean() / 3
        loss.backward()
        losses.append(loss)
    return losses


def late_backwards(model: Any) -> list[Any]:
    losses = [model(torch.randn(6, 8)).square().mean() for _ in range(3)]
    for loss in reversed(losses):
        loss.backward()
    return losses


def evaluation_between(model: Any) -> list[Any]:
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(x).square().mean()
    with torch.no_grad():
        seen = model.eval()(x)
    with torch.inference_mode():
        also = model(x).sum().item()
    model.train()
    loss.backward()
    return [loss, x.grad, seen, also]


def several_steps(model: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [*losses, *(p.detach() for p in model.parameters())]


STEPS = [siamese, chained, accumulation, late_backwards, evaluation_between, several_steps]


def test_arguments_and_results_of_every_kind() -> None:
    check(Job(Nested, nested))


@pytest.mark.parametrize("step", STEPS, ids=[step.__name__ for step in STEPS])
def test_calls_in_a_step(step: Any) -> None:
    check(Job(Siamese, step))


def test_sections_without_gradients() -> None:
    class Teacher(Siamese):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.body(x).exp()
                target -= target.mean()
            with torch.inference_mode():
                mask = self.body[1](x) > 0
            return torch.sin(self.body(x) * target) * mask.float() + self.body(x).detach()

    check(Job(Teacher, chained))


def test_a_recording_inside_another() -> None:
    job = Job(Siamese, chained)
    plain, spy = outcome(job), Spy()
    outcome(job, spy)
    outer, inner = everything(job), choices(spy.ops)["interleaved"].decisions()

    def both(model: Any) -> list[Any]:
        with recorded(model.body, inner):
            return chained(model)

    assert outcome(Job(Siamese, both), outer).differences(plain) == []
    assert outcome(Job(Siamese, both), Decisions({})).differences(plain) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_and_inside(reentrant: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def part(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(torch.sin(self.layers[1](x)), 0.3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.exp(self.layers[0](x))
            x = torch.sin(checkpoint(self.part, x, use_reentrant=reentrant))
            return torch.sin(self.layers[2](x)) * x

    check(Job(Mixed, chained))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mixed()

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(checkpoint(self.inner, x, use_reentrant=reentrant))

    job = Job(Around, chained)
    decisions = everything(job)

    def inside(model: Any) -> list[Any]:
        with recorded(model.inner, decisions):
            return chained(model)

    assert outcome(Job(Around, inside)).differences(outcome(job)) == []


def test_batch_norm_under_the_naive_way_advances_twice() -> None:
    """What the tests above would miss if they compared nothing but losses and gradients."""
    job = Job(Siamese, chained)
    found = outcome(job, wrap=checkpointed).differences(outcome(job))
    assert found and all(name.startswith("state") for name in found)


def test_a_recording_without_decisions_changes_no_saved_tensor() -> None:
    x = torch.randn(4, requires_grad=True)
    with Recording(Decisions({})):
        y = x.exp()
    assert y.grad_fn is not None
    saved = y.grad_fn._saved_result  # type: ignore[attr-defined]
    assert saved.data_ptr() == y.data_ptr()
