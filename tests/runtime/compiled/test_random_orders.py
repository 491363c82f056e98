"""Any order that the dependencies allow gives the same bits: a dependency that is missing shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memplan.order.evaluate import peak
from memplan.runtime.compiled import compile as compiling
from memplan.runtime.compiled.dependencies import Operators
from memplan.runtime.compiled.ordering import Ordering
from tests.order.graphs import random_order
from tests.runtime.compiled.training import Job, batches, run_both


@dataclass
class Trained:
    model: Any
    optimizer: torch.optim.Optimizer


def job(model: nn.Module, body: Callable[[Trained, Tensor, Tensor], Any]) -> Job:
    made = Trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step(x: Tensor, y: Tensor) -> Any:
        return body(made, x, y)

    return Job(model, made.optimizer, step, batches((5, 6), count=5))


def train(made: Trained, loss: Tensor) -> Tensor:
    loss.backward()
    made.optimizer.step()
    made.optimizer.zero_grad()
    return loss.detach()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def views() -> Job:
    """Views that are written through other views, of a batch, of buffers and of activations."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("all", torch.zeros(10))
            self.register_buffer("part", self.get_buffer("all")[2:6])

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            whole, part = self.get_buffer("all"), self.get_buffer("part")
            part.lerp_(h.detach().mean(0), 0.1)
            whole[3] += 1
            whole.view(2, 5)[1].mul_(0.9)
            h = h.clone()
            h.t()[0].fill_(0.5)
            h[:, 1:3].mul_(part[:2] + whole.sum())
            return h

    def step(made: Trained, x: Tensor, y: Tensor) -> Any:
        x.sub_(x.mean(0)).div_(x.std(0) + 1)
        x.view(-1)[::7].zero_()
        x.masked_fill_(x > 2, 2.0)
        return train(made, F.cross_entropy(made.model(x), y))

    return job(Model(), step)


def flat_gradients() -> Job:
    """Gradients that are parts of one tensor, cleared and clipped through it."""
    model = perceptron()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    begin = 0
    for p in model.parameters():
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()

    def step(made: Trained, x: Tensor, y: Tensor) -> Any:
        flat.zero_()
        loss = F.cross_entropy(made.model(x), y)
        loss.backward()
        flat.mul_(0.5)
        norm = flat.norm()
        made.optimizer.step()
        return loss.detach(), norm

    return job(model, step)


def sharpness() -> Job:
    """Two passes, with weights that are moved and moved back."""

    def step(made: Trained, x: Tensor, y: Tensor) -> Any:
        weights = list(made.model.parameters())
        F.cross_entropy(made.model(x), y).backward()
        with torch.no_grad():
            before = [p.clone() for p in weights]
            torch._foreach_add_(weights, [p.grad for p in weights], alpha=0.1)
        made.optimizer.zero_grad()
        loss = F.cross_entropy(made.model(x), y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(weights, before)
        made.optimizer.step()
        made.optimizer.zero_grad()
        return loss.detach()

    return job(perceptron(), step)


def draws() -> Job:
    """Two generators, and operators that draw in place."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.RReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 4))

    def step(made: Trained, x: Tensor, y: Tensor) -> Any:
        noise = torch.normal(torch.zeros(5, 6), 0.1, generator=generator)
        mixed = x[torch.randperm(5)] + torch.empty(5, 6).uniform_(generator=generator) + noise
        return train(made, F.cross_entropy(made.model(mixed), y)), torch.rand(2)

    return job(model, step)


def embeddings() -> Job:
    """Tied tables of which one is renormed in forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Embedding(10, 4, max_norm=0.5, padding_idx=0)
            self.two = nn.Embedding(10, 4)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            x = x.abs().long()
            return self.one(x).mean(1) + self.two(x).sum(1) + self.one(x + 1).mean(1)

    return job(Model(), lambda made, x, y: train(made, F.cross_entropy(made.model(x), y)))


@pytest.mark.parametrize("make", [views, flat_gradients, sharpness, draws, embeddings])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_bits_are_the_same_in_any_order(
    make: Callable[[], Job], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = count(seed)

    def any_order(operators: Operators, **options: Any) -> Ordering:
        graph = operators.graph
        order = random_order(graph, next(seeds))
        least = peak(graph, order)
        return Ordering(operators.schedule(order), len(graph), least, least, 0, 0.0)

    monkeypatch.setattr(compiling, "choose_order", any_order)
    step, _ = run_both(make)
    assert step.report().compiled_calls == 3, step.report()
