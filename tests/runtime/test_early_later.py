"""Early weight updates where a loop changes after its first steps, or hides what it uses."""

from __future__ import annotations

import copy
import io
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memplan.types.errors import EarlyUpdateError
from tests.runtime.early_loop import Applied, Loop, Optimizers, later, same

linear = nn.functional.linear


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Applied:
    return Applied.watching(monkeypatch)


class Layers(Loop):
    def build(self) -> Any:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))

    step = -1

    def backward(self, step: int) -> None:
        self.step = step
        super().backward(step)


# Served


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


# Refused, from the first step or from the one in which it can be seen, before any update


class Shared(Layers):
    says = "share memory"

    def after(self, step: int) -> None:
        self.model[2].weight.data = self.model[0].weight.data


class DataUsed(Layers):
    """Autograd does not compare the versions of what was used by `.data`."""

    says = "MmBackward0 may use a parameter"

    def forward(self, x: Tensor) -> Tensor:
        first, relu, second, last = self.model
        hidden = first(x)
        return last(second(relu(hidden))) + linear(hidden, last.weight.data)


class PassedOn(DataUsed):
    """Unchanged, by hooks that save values in their own way."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (1, t), lambda packed: packed[1]):
            return super().forward(x)


class HookedAfter(Loop):
    """Where gradients are gone and what stands for them is not there yet."""

    says = "something is hooked"

    def after(self, step: int) -> None:
        self.optimizers[0].register_step_post_hook(self._log)

    def _log(self, *_: Any) -> None:
        self.seen += [p.grad.norm() for p in self.model.parameters() if p.grad is not None]


class HookedEverywhere(Loop):
    says = "something is hooked"
    hook: Any = None

    def after(self, step: int) -> None:
        self.hook = self.hook or register_optimizer_step_pre_hook(self._clip)

    def _clip(self, *_: Any) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def end(self) -> None:
        self.hook.remove()


class TensorRate(Loop):
    says = "is a tensor"

    def between(self, step: int) -> None:
        (group,) = self.optimizers[0].param_groups
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)

    def after(self, step: int) -> None:
        self.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.01)


class InAThread(Loop):
    says = "another thread"

    def backward(self, step: int) -> None:
        thread = threading.Thread(target=super().backward, args=(step,))
        thread.start()
        thread.join()


def later_forward(loop: Any, at: int = 2) -> Any:
    """Has the forward pass of `loop` from step `at` on."""

    class Later(loop):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return loop.forward(self, x) if self.step >= at else Layers.forward(self, x)

    Later.__name__ = f"{loop.__name__}Later"
    return Later


# Done for the first time where it is too late


class StateSaved(Loop):
    says = r"state_dict\(\) of the optimizer"

    def between(self, step: int) -> None:
        self.seen.append(copy.deepcopy(self.optimizers[0].state_dict()))


class StateLoaded(Loop):
    def between(self, step: int) -> None:
        empty = self.make(list(self.model.parameters())).state_dict()
        self.optimizers[0].load_state_dict(empty)


class StateRead(Loop):
    def between(self, step: int) -> None:
        self.seen += [state["exp_avg"].norm() for state in self.optimizers[0].state.values()]


class StateCleared(Loop):
    def between(self, step: int) -> None:
        self.optimizers[0].state.clear()


class StateReplaced(Loop):
    def between(self, step: int) -> None:
        for p, state in self.optimizers[0].state.items():
            state["exp_avg"] = torch.zeros(p.shape)


class WeightsSwapped(Loop):
    says = "weights or the optimizer's state are replaced"

    def between(self, step: int) -> None:
        for p in self.model.parameters():
            p.data = torch.ones(p.shape)


class LeftOut(Loop):
    """Of the optimizer, between a gradient and the step."""

    def between(self, step: int) -> None:
        self.optimizers[0].param_groups[0]["params"].pop()


class GradientsSaved(Loop):
    def after(self, step: int) -> None:
        torch.save([p.grad for p in self.model.parameters()], io.BytesIO())


class GradientsListed(Loop):
    def after(self, step: int) -> None:
        self.seen += [p.grad.tolist() for p in self.model.parameters()]


class GradientsAsArrays(Loop):
    def after(self, step: int) -> None:
        self.seen += [p.grad.cpu().numpy() for p in self.model.parameters()]


class WeightInAHook(Layers):
    """Of a gradient that comes after that of the weight."""

    def between(self, step: int) -> None:
        if len(self.seen) == 3:
            self.model[0].weight.register_hook(self._log)

    def _log(self, _gradient: Tensor) -> None:
        self.seen.append(self.model[3].weight.detach().norm())


class WeightOfAFunction(Layers):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
            ctx.model = model
            return x * model[3].weight.detach().sum()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return gradients[0] * ctx.model[3].weight.detach().sum(), None

    def forward(self, x: Tensor) -> Tensor:
        first, relu, second, last = self.model
        return last(second(relu(self.Scale.apply(first(x), self.model))))


class WeightRecomputed(Layers):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self._block, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.model[3](y)

    def _block(self, x: Tensor) -> Tensor:
        return self.model[:3](x) * self.model[3].weight.detach().sum()


class WeightRecomputedWithin(WeightRecomputed):
    reentrant = True


class Both(InAThread):
    """A backward pass in another thread that finds weights already updated."""

    def backward(self, step: int) -> None:
        Loop.backward(self, step)
        self.loss_failed: list[BaseException] = []
        thread = threading.Thread(target=self._second)
        thread.start()
        thread.join()
        if self.loss_failed:
            raise self.loss_failed[0]

    def _second(self) -> None:
        try:
            self.loss().backward()
        except EarlyUpdateError as error:
            self.loss_failed.append(error)


NOTICED: list[tuple[Any, int]] = [
    (later(Shared, 1), 6),
    (later(HookedAfter, 1), 6),
    (later(HookedEverywhere, 1), 6),
    (later(TensorRate, 1), 6),
    (later(InAThread, 2), 6),
    (InAThread, 0),
    (DataUsed, 0),
    (PassedOn, 0),
    (WeightsSwapped, 0),
    (StateSaved, 0),
]


@pytest.mark.parametrize(
    ("loop", "early"),
    [*NOTICED, (later_forward(DataUsed), 6), (later_forward(PassedOn), 6)],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_is_noticed_in_time_ends_it(applied: Applied, loop: Any, early: int) -> None:
    assert same(applied(loop).result(), loop().run().result())
    assert applied.early == early and len(applied.notes) == 1
    assert re.search(loop.says, applied.notes[0]), applied.notes
    assert not _get_current_dispatch_mode_stack()


UNDONE = [
    StateSaved, StateLoaded, StateRead, StateCleared, StateReplaced, WeightsSwapped,
    LeftOut, GradientsSaved, GradientsListed, GradientsAsArrays, Both,
]  # fmt: skip


@pytest.mark.parametrize(
    "loop",
    [
        *map(later, UNDONE),
        later(WeightInAHook, 1),
        *map(later_forward, (WeightOfAFunction, WeightRecomputed, WeightRecomputedWithin)),
    ],
)
def test_what_cannot_be_undone_is_an_error(applied: Applied, loop: Any) -> None:
    with pytest.raises(EarlyUpdateError, match="has already updated"):
        applied(loop)
    assert applied.early and not applied.notes


@pytest.mark.parametrize("loop", [WeightOfAFunction, WeightRecomputed, WeightRecomputedWithin])
def test_in_the_first_step_it_is_seen(applied: Applied, loop: Any) -> None:
    assert same(applied(loop).result(), loop().run().result())
    assert not applied.early
    assert "uses a parameter before the optimizer does" in applied.notes[0]
