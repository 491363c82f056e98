"""Loops that updates in backward serve although something of theirs is out of the ordinary."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.runtime.optimizer_in_backward.loop import Applied, Layers, Loop, Optimizers, same


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Applied:
    return Applied.watching(monkeypatch)


class Products(Loop):
    """Autograd computes these gradients in another way while a dispatch mode is active."""

    def loss(self) -> Tensor:
        out = self.forward(torch.randn(12, 8)).softmax(-1) * 3
        return out.prod(-1).sum() + out.cumprod(-1).mean()


class MovedLater(Loop):
    def after(self, step: int) -> None:
        if step == 1:
            for p in self.model.parameters():
                p.data = p.data.clone()


class WiderLater(Layers):
    make = staticmethod(lambda parameters: optim.SGD(parameters, 0.1))

    def loss(self) -> Tensor:
        out = self.forward(torch.randn(12, 8, dtype=self.model[0].weight.dtype))
        return nn.functional.cross_entropy(out, torch.arange(12) % 3)

    def after(self, step: int) -> None:
        if step == 1:
            self.model.double()


class OneAfterTheOther(Loop):
    """Uses a weight when its own optimizer has stepped, before the other's step."""

    def optimize(self) -> Optimizers:
        first, *_, last = self.model
        return [optim.SGD(first.parameters(), 0.1), optim.Adam(last.parameters())]

    def update(self, step: int) -> None:
        self.optimizers[0].step()
        self.seen.append(self.model[0].weight.detach().norm())
        self.optimizers[1].step()


class Counted(Loop):
    """A dispatch mode of the job's own around a step."""

    def update(self, step: int) -> None:
        with FlopCounterMode(display=False):
            super().update(step)

    def after(self, step: int) -> None:
        self.seen.append(len(_get_current_dispatch_mode_stack()) <= 1)


class SavedAfter(Loop):
    def after(self, step: int) -> None:
        self.seen.append(copy.deepcopy(self.optimizers[0].state_dict()))


class Recomputed(Layers):
    """A block that is checkpointed in the old way: a backward pass within the other."""

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self.model[:3], x.requires_grad_(), use_reentrant=True)
        return self.model[3](y)


class AttentionRecomputed(Layers):
    """Frozen, in evaluation mode, without gradients: PyTorch has a faster way for it, that it does
    not take where any function mode is active."""

    def build(self) -> Any:
        frozen = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
        return nn.Sequential(nn.Linear(8, 8), frozen, nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self._block, x, use_reentrant=False)
        return self.model[2](y)

    def _block(self, x: Tensor) -> Tensor:
        first, frozen, _ = self.model
        return first(x) * frozen(x[:, None].expand(-1, 3, -1)).mean(1)


class Experts(Loop):
    """Weights that have a gradient in some steps only."""

    def build(self) -> Any:
        return nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return self.model[0](x) + self.model[self.count % 3](x)


class UnderAMode(Experts):
    """A function mode of the job's own, as a default device is one: it holds where the optimizer
    makes its state."""

    make = staticmethod(lambda parameters: optim.AdamW(parameters, foreach=False))

    class Made(TorchFunctionMode):
        count = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.tensor
            return func(*args, **(kwargs or {}))

    def run(self) -> Loop:
        with self.Made() as mode:
            super().run()
        self.seen.append(mode.count)
        return self


class Loaded(Loop):
    def zero(self, step: int) -> None:
        super().zero(step)
        if step == 1:
            file = io.BytesIO()
            torch.save((self.model, self.optimizers), file)
            file.seek(0)
            self.model, self.optimizers = torch.load(file, weights_only=False)


SERVED: list[tuple[type[Loop], int]] = [
    (Products, 3 * 6),
    (MovedLater, 3 * 6),
    (WiderLater, 3 * 6),
    (OneAfterTheOther, 3 * 4),
    (Counted, 3 * 6),
    (SavedAfter, 3 * 6),
    (Recomputed, 3 * 6),
    (AttentionRecomputed, 3 * 4),
    (Experts, 2 + 2 + 4),
    (UnderAMode, 2 + 2 + 4),
    (Loaded, 6),
]
"""With how many updates are made early in all."""


@pytest.mark.parametrize("same_job", [True, False])
@pytest.mark.parametrize(("loop", "early"), SERVED, ids=lambda v: getattr(v, "__name__", ""))
def test_the_same_bits(applied: Applied, loop: type[Loop], early: int, same_job: bool) -> None:
    assert same(applied(loop, same_job=same_job).result(), loop().run().result())
    assert applied.notes == []
    assert applied.early <= early and (applied.early == early or not same_job)
    assert not _get_current_dispatch_mode_stack()
