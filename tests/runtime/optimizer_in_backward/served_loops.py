"""Loops that updates in backward serve."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from tests.runtime.optimizer_in_backward.loop import STEPS, Loop, Optimizers


class Accelerated(Loop):
    """What a loop may do with its optimizer and weights without being in the way."""

    def optimize(self) -> Optimizers:
        self.optimizer = optim.SGD(
            [
                {"params": [*self.model[0].parameters()], "lr": 0.2},
                {"params": [*self.model[1:].parameters()], "weight_decay": 0.1},
            ],
            lr=0.1,
            momentum=0.9,
        )
        self.schedule = optim.lr_scheduler.OneCycleLR(self.optimizer, 0.5, total_steps=STEPS)
        self.average = copy.deepcopy(self.model)
        return [self.optimizer]

    def after(self, step: int) -> None:
        self.schedule.step()
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        self.model.eval()
        self.seen += [self.forward(torch.ones(2, 8)).detach(), *map(torch.norm, values_of(self))]
        self.model.train()

    def end(self) -> None:
        self.model.to(torch.float64)


class ZeroFirst(Loop):
    def backward(self, step: int) -> None:
        for p in self.model.parameters():
            p.grad = None
        super().backward(step)

    def zero(self, step: int) -> None: ...

    def end(self) -> None:
        assert all(p.grad is not None for p in self.model.parameters())
        self.model.to(torch.float64)


class Tied(Loop):
    def build(self) -> Any:
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
        model[2].weight = model[0].weight
        return model


class Frozen(Loop):
    def build(self) -> Any:
        model = super().build()
        model[0].weight.requires_grad_(False)
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        model.forward = lambda x: nn.Sequential(*list(model.children()))(x)
        return model

    def after(self, step: int) -> None:
        if step == 1:
            self.model[0].weight.requires_grad_(True)


class Checkpointed(Loop):
    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self.model[:3], x.requires_grad_(), use_reentrant=False)
        return self.model[3:](y)


class Autocast(Loop):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


class TwoOptimizers(Loop):
    def optimize(self) -> Optimizers:
        first, *_, last = self.model
        norm = self.model[1]
        return [
            optim.SGD([*first.parameters(), *norm.parameters()], 0.1),
            optim.Adam(last.parameters()),
        ]


class Restored(Loop):
    def after(self, step: int) -> None:
        if step == 1:
            self.saved = copy.deepcopy(self.optimizers[0].state_dict())
        if step == 2:
            self.optimizers[0].load_state_dict(self.saved)


class GrowsLater(Loop):
    """A group comes later, and then another optimizer: each time the next step is watched."""

    def optimize(self) -> Optimizers:
        return [optim.SGD(self.model[0].parameters(), 0.1)]

    def after(self, step: int) -> None:
        if step == 0:
            self.optimizers[0].add_param_group({"params": [*self.model[1].parameters()]})

    def zero(self, step: int) -> None:
        self.model.zero_grad()
        if step == 1:
            del self.optimizers[0]
            self.optimizers.append(optim.Adam(self.model.parameters()))


SERVED: list[tuple[type[Loop], int]] = [
    (Loop, 3 * 6),
    (Accelerated, 3 * 6),
    (ZeroFirst, 3 * 6),
    (Tied, 3 * 5),
    (Frozen, 3 * 5),
    (Checkpointed, 3 * 6),
    (Autocast, 3 * 6),
    (TwoOptimizers, 3 * 6),
    (Restored, 3 * 6),
    (GrowsLater, 6),
]
"""With how many updates are made early in all."""


def parameters_of(optimizer: optim.Optimizer) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def values_of(loop: Loop) -> list[Tensor]:
    return [p.detach() for p in loop.model.parameters()]


def double_of(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(2)
