"""Loops that updates in backward do not serve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from tests.runtime.optimizer_in_backward.loop import Loop, Optimizers, later
from tests.runtime.optimizer_in_backward.served_loops import (
    TwoOptimizers,
    double_of,
    parameters_of,
    values_of,
)

# Loops in which an early update would change a number


class Clipped(Loop):
    says = "linalg_vector_norm|_foreach_norm"

    def between(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class ClippedByValue(Loop):
    says = "clamp"

    def between(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)


class Accumulated(Loop):
    says = "accumulated"

    def backward(self, step: int) -> None:
        super().backward(step)
        super().backward(step)


class AccumulatedAtOnce(Loop):
    """Losses of two micro-batches whose backward passes run one in the other's place."""

    says = "accumulated"

    def backward(self, step: int) -> None:
        first, second = self.loss(), self.loss()
        first.backward()
        second.backward()


class Kept(Loop):
    says = "kept from one backward pass|uses a gradient"

    def zero(self, step: int) -> None:
        for p in self.model.parameters():
            p.grad.zero_()


class NeverZeroed(Loop):
    says = "kept from one backward pass"

    def zero(self, step: int) -> None: ...


class Scaled(Loop):
    says = "GradScaler"

    def optimize(self) -> Optimizers:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        return super().optimize()

    def backward(self, step: int) -> None:
        self.scaler.scale(self.loss()).backward()

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.update()


class Closure(Loop):
    says = "closure"

    def update(self, step: int) -> None:
        self.optimizers[0].step(lambda: torch.zeros(()))  # type: ignore[arg-type,return-value]


class BackwardInClosure(Loop):
    """As Lightning does."""

    says = "closure"

    def backward(self, step: int) -> None: ...

    def update(self, step: int) -> None:
        self.optimizers[0].step(self._closure)

    def _closure(self) -> Any:
        loss = self.loss()
        self.optimizers[0].zero_grad()
        loss.backward()
        self.seen.append(loss.item())
        return loss


class LBFGS(Loop):
    says = "LBFGS is not known|closure"
    make = staticmethod(lambda parameters: optim.LBFGS(parameters))

    def update(self, step: int) -> None:
        self.optimizers[0].step(lambda: self.loss())  # type: ignore[arg-type,return-value]


class OwnOptimizer(Loop):
    says = "Signs is not known"

    class Signs(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            scale = sum(p.grad.abs().sum() for p in parameters_of(self))
            for p in parameters_of(self):
                p.grad.div_(scale)
            return super().step(closure)

    make = staticmethod(lambda parameters: OwnOptimizer.Signs(parameters, 0.1))


class Logged(Loop):
    says = "uses a gradient"

    def between(self, step: int) -> None:
        self.seen += [p.grad.norm() for p in self.model.parameters() if p.grad is not None]


class LoggedAfter(Loop):
    """Known to a capture only: see `same_job`."""

    says = "uses a gradient"

    def after(self, step: int) -> None:
        self.seen += [p.grad.norm() for p in self.model.parameters() if p.grad is not None]


class WeightsLogged(Loop):
    says = "uses a parameter"

    def between(self, step: int) -> None:
        self.seen += [weight.norm() for weight in values_of(self)]


class Evaluated(Loop):
    says = "uses a parameter"

    def between(self, step: int) -> None:
        with torch.no_grad():
            self.seen.append(self.loss())


class Hooked(Loop):
    says = "something else waits"

    def optimize(self) -> Optimizers:
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.norm()))
        return super().optimize()


class StepHooked(Loop):
    says = "something is hooked"

    def optimize(self) -> Optimizers:
        (optimizer,) = super().optimize()
        optimizer.register_step_pre_hook(lambda *_: double_of(self.model))
        return [optimizer]


class Sparse(Loop):
    says = "sparse"

    def build(self) -> Any:
        return nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Flatten(), nn.Linear(64, 3))

    make = staticmethod(lambda parameters: optim.SGD(parameters, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.argsort())


class ScheduledBetween(Loop):
    says = "hyperparameters change"

    def optimize(self) -> Optimizers:
        optimizers = super().optimize()
        self.schedule = optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
        return optimizers

    def between(self, step: int) -> None:
        self.schedule.step()


class OwnBetas(Loop):
    """A list that is changed in place."""

    says = "hyperparameters change"

    def optimize(self) -> Optimizers:
        optimizers = super().optimize()
        optimizers[0].param_groups[0]["betas"] = [0.9, 0.99]
        return optimizers

    def between(self, step: int) -> None:
        self.optimizers[0].param_groups[0]["betas"][0] -= 0.1


class Retained(Loop):
    says = "keeps its graph"

    def backward(self, step: int) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        loss.backward()


class Alternating(Loop):
    says = "uses a parameter|step at other times"

    optimize = TwoOptimizers.optimize

    def update(self, step: int) -> None:
        self.optimizers[step % 2].step()


class Reentrant(Loop):
    """A block that is checkpointed in the old way, twice: its gradients come in two parts."""

    says = "several parts|uses|accumulated"

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.model[0], x.requires_grad_(), use_reentrant=True)
        return self.model[1](x)

    def build(self) -> Any:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))


class SkipsTheFirst(Loop):
    says = "not followed by the optimizer"

    def update(self, step: int) -> None:
        if step:
            super().update(step)


class Replaced(Loop):
    says = "uses a gradient|changed before"

    def between(self, step: int) -> None:
        for p in self.model.parameters():
            p.grad = p.grad * 2


class ReplacedUnseen(Loop):
    says = "changed before|removed before"

    def between(self, step: int) -> None:
        for number, p in enumerate(self.model.parameters()):
            p.grad = None if number == step else torch.ones(p.shape)


class TensorRate(Loop):
    says = "is a tensor"
    make = staticmethod(lambda parameters: optim.Adam(parameters, lr=torch.tensor(0.01)))


class StepReplaced(Loop):
    """Accelerate's, with a scaler, only notes that it came; another one may do anything."""

    says = "the step of this SGD has been replaced"
    make = staticmethod(lambda parameters: optim.SGD(parameters, lr=0.1))

    def optimize(self) -> Optimizers:
        [optimizer] = super().optimize()
        own: Any = optimizer.step
        optimizer.step = lambda: own()  # type: ignore[assignment,method-assign]
        return [optimizer]


class SharedByTwo(Loop):
    says = "a parameter has two optimizers"

    def optimize(self) -> Optimizers:
        return [self.make(list(self.model.parameters())) for _ in range(2)]


class UnderAutocast(Loop):
    says = "under autocast"

    def backward(self, step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            super().backward(step)


class ReadByBackward(Loop):
    """The weight's gradient is complete before another node has used what it saved of it."""

    says = "uses a parameter"

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Callable[[], Tensor]) -> Tensor:
            ctx.weight = weight  # not saved for backward: PyTorch does not check it
            return x * weight().detach().sum()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return gradients[0] * ctx.weight().detach().sum(), None

    def forward(self, x: Tensor) -> Tensor:
        x = self.Scale.apply(self.model[0](x), lambda: self.model[4].weight)
        return self.model[1:](x)


REFUSED: list[Any] = [
    Clipped, ClippedByValue, Accumulated, AccumulatedAtOnce, Kept, NeverZeroed, Scaled, Closure,
    BackwardInClosure, LBFGS,
    OwnOptimizer, Logged, LoggedAfter, WeightsLogged, Evaluated, Hooked, StepHooked, Sparse,
    ScheduledBetween, Retained, Alternating, Reentrant, SkipsTheFirst, Replaced, ReplacedUnseen,
    OwnBetas, TensorRate, StepReplaced, SharedByTwo, UnderAutocast, ReadByBackward,
]  # fmt: skip


# Loops that do in a later step what they have not done in the first


class Fails(Loop):
    """An error in the middle of a backward pass, which the loop takes for a batch to skip."""

    def backward(self, step: int) -> None:
        x = torch.randn(12, 8, requires_grad=True)
        x.register_hook(self._fail)
        nn.functional.cross_entropy(self.forward(x), torch.arange(12) % 3).backward()

    def _fail(self, _gradient: Tensor) -> None:
        raise ValueError("on purpose")

    def run(self) -> Loop:
        try:
            return super().run()
        except ValueError:
            self.loss()
            raise AssertionError("half of an update was used") from None


class Skips(Loop):
    def update(self, step: int) -> None: ...


class Others(Loop):
    def update(self, step: int) -> None:
        optimizer = copy.copy(self.optimizers[0])
        optimizer.step()


UNDONE: list[type[Loop]] = [
    Clipped, ClippedByValue, Accumulated, AccumulatedAtOnce, Scaled, Closure, Logged, LoggedAfter,
    WeightsLogged, Evaluated, ScheduledBetween, Replaced, ReplacedUnseen, Fails, Skips, Others,
    OwnBetas,
]  # fmt: skip


class HookedLate(Loop):
    says = "something else waits"

    def after(self, step: int) -> None:
        if step == 1:
            for p in self.model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.norm()))


class StepHookedLate(Loop):
    says = "something is hooked"

    def after(self, step: int) -> None:
        if step == 1:
            self.optimizers[0].register_step_pre_hook(lambda *_: double_of(self.model))


NOTICED: list[Any] = [
    later(BackwardInClosure),
    later(Retained),
    later(UnderAutocast),
    HookedLate,
    StepHookedLate,
]
"""In time: nothing has been updated yet."""
