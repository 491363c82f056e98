"""The optimizer in backward where a loop changes after its first steps, or hides what it uses."""

from __future__ import annotations

import copy
import io
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from memplan.types.errors import OptimizerInBackwardError
from tests.runtime.optimizer_in_backward.loop import Applied, Layers, Loop, later, same

linear = nn.functional.linear


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Applied:
    return Applied.watching(monkeypatch)


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
        except OptimizerInBackwardError as error:
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
    with pytest.raises(OptimizerInBackwardError, match="has already updated"):
        applied(loop)
    assert applied.early and not applied.notes


@pytest.mark.parametrize("loop", [WeightOfAFunction, WeightRecomputed, WeightRecomputedWithin])
def test_in_the_first_step_it_is_seen(applied: Applied, loop: Any) -> None:
    assert same(applied(loop).result(), loop().run().result())
    assert not applied.early
    assert "uses a parameter before the optimizer does" in applied.notes[0]
