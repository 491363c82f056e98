"""A training loop to vary, and what updates in backward do to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from memplan.runtime.optimizer_in_backward import (
    OptimizerInBackward,
    preconditions,
    updates,
    watched,
)
from memplan.types.plan import OrderPart

STEPS = 4
Optimizers = list[optim.Optimizer]


class Loop:
    """A training loop with places where a variant does something of its own."""

    make: Callable[[list[nn.Parameter]], optim.Optimizer] = staticmethod(
        lambda parameters: optim.AdamW(parameters, lr=0.01)
    )

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = self.build()
        self.optimizers = self.optimize()
        self.seen: list[Any] = []

    def build(self) -> Any:
        return nn.Sequential(
            nn.Linear(8, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 3)
        )

    def optimize(self) -> Optimizers:
        return [self.make(list(self.model.parameters()))]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def loss(self) -> Tensor:
        out = self.forward(torch.randn(12, 8))
        return nn.functional.cross_entropy(out, torch.arange(12) % 3)

    def backward(self, step: int) -> None:
        loss = self.loss()
        loss.backward()
        self.seen.append(loss.item())

    def between(self, step: int) -> None: ...

    def update(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def after(self, step: int) -> None: ...

    def zero(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def end(self) -> None: ...

    def run(self) -> Loop:
        for step in range(STEPS):
            self.backward(step)
            self.between(step)
            self.update(step)
            self.after(step)
            self.zero(step)
        self.end()
        return self

    def result(self) -> list[Any]:
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return [self.seen, list(self.model.state_dict().values()), states]


class Layers(Loop):
    def build(self) -> Any:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))

    step = -1

    def backward(self, step: int) -> None:
        self.step = step
        super().backward(step)


def later(loop: type[Loop], at: int = 2) -> type[Loop]:
    """Does as `loop` from step `at` on, and as the plain one before."""

    class Later(loop):  # type: ignore[misc,valid-type]
        def _turn(self, name: str, step: int) -> None:
            getattr(loop if step >= at else Loop, name)(self, step)

        def backward(self, step: int) -> None:
            self._turn("backward", step)

        def between(self, step: int) -> None:
            self._turn("between", step)

        def update(self, step: int) -> None:
            self._turn("update", step)

        def after(self, step: int) -> None:
            self._turn("after", step)

    Later.__name__ = f"{loop.__name__}Later"
    return Later


def same(one: Any, other: Any) -> bool:
    """To the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Applied:
    """Runs a loop with updates in backward; what was said and how many were made early."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.early = 0

    def __call__(
        self,
        loop: type[Loop],
        parameters: int = 0,
        *,
        same_job: bool = True,
        from_first: bool = False,
    ) -> Loop:
        part = OrderPart(parameters=parameters, gradient_bytes=0, from_first=from_first)
        early = OptimizerInBackward(part, self.notes.append, same_job=same_job)
        self.account = early.account
        with early:
            return loop().run()

    @classmethod
    def watching(cls, monkeypatch: pytest.MonkeyPatch) -> Applied:
        """One that counts, and that takes this process for that of the loop alone."""
        applied = cls()

        class Guard(watched.Guard):
            def add(self, tensors: list[Tensor]) -> None:
                applied.early += 1
                super().add(tensors)

        monkeypatch.setattr(updates, "Guard", Guard)
        monkeypatch.setattr(updates, "reads_gradients", lambda: "")  # these files do
        monkeypatch.setattr(preconditions, "has_compiled", lambda: False)  # another test may have
        return applied
