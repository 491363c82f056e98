"""The optimizer in backward: the same bits as the plain loop, or no such update, or an error."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from memplan.runtime.apply import AppliedEverywhere
from memplan.runtime.optimizer_in_backward.preconditions import _first_read
from memplan.types.errors import OptimizerInBackwardError
from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart
from tests.runtime.optimizer_in_backward.loop import STEPS, Applied, Loop, Optimizers, later, same


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Applied:
    return Applied.watching(monkeypatch)


# Loops that updates in backward serve


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
        self.seen += [self.forward(torch.ones(2, 8)).detach(), *map(torch.norm, _values(self))]
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
            scale = sum(p.grad.abs().sum() for p in _parameters(self))
            for p in _parameters(self):
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
        self.seen += [weight.norm() for weight in _values(self)]


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
        optimizer.register_step_pre_hook(lambda *_: _double(self.model))
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
    TensorRate, SharedByTwo, UnderAutocast, ReadByBackward,
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
            self.optimizers[0].register_step_pre_hook(lambda *_: _double(self.model))


NOTICED: list[Any] = [
    later(BackwardInClosure),
    later(Retained),
    later(UnderAutocast),
    HookedLate,
    StepHookedLate,
]
"""In time: nothing has been updated yet."""


def _parameters(optimizer: optim.Optimizer) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _values(loop: Loop) -> list[Tensor]:
    return [p.detach() for p in loop.model.parameters()]


def _double(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(2)


@pytest.mark.parametrize("same_job", [True, False])
@pytest.mark.parametrize(("loop", "early"), SERVED, ids=lambda v: getattr(v, "__name__", ""))
def test_the_same_bits(applied: Applied, loop: type[Loop], early: int, same_job: bool) -> None:
    assert same(applied(loop, same_job=same_job).result(), loop().run().result())
    assert (applied.early, applied.notes) == (early, [])


KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "foreach": True}),
    (optim.Adam, {"amsgrad": True}),
    (optim.Adam, {"fused": True}),
    (optim.Adam, {"maximize": True, "foreach": True}),
    (optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    (optim.NAdam, {"foreach": True}),
    (optim.RAdam, {}),
    (optim.Adamax, {"foreach": True}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adadelta, {"foreach": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {"foreach": True}),
    (optim.ASGD, {"foreach": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_optimizer(applied: Applied, kind: Any, options: dict[str, Any]) -> None:
    class Own(Loop):
        make = staticmethod(lambda parameters: kind(parameters, **options))

    assert same(applied(Own).result(), Own().run().result())
    assert applied.early == 3 * 6 and not applied.notes


@pytest.mark.parametrize("loop", REFUSED)
def test_where_it_would_change_a_number_nothing_is_early(applied: Applied, loop: Any) -> None:
    found = applied(loop, same_job=False)
    assert same(found.result(), loop().run().result())
    assert applied.early == 0
    (note,) = applied.notes
    assert "weights are updated by the optimizer's step" in note
    assert re.search(loop.says, note), note


@pytest.mark.parametrize("loop", NOTICED)
def test_what_is_noticed_in_time_ends_it(applied: Applied, loop: Any) -> None:
    assert same(applied(loop).result(), loop().run().result())
    assert applied.early == 6 and len(applied.notes) == 1
    assert re.search(loop.says, applied.notes[0]), applied.notes


@pytest.mark.parametrize("loop", UNDONE)
def test_what_cannot_be_undone_is_an_error(applied: Applied, loop: type[Loop]) -> None:
    with pytest.raises((OptimizerInBackwardError, RuntimeError)) as error:
        applied(later(loop))
    assert "has already updated" in str(error.value)


def test_a_first_step_that_reads_gradients_late_is_an_error_too(applied: Applied) -> None:
    """Where the plan's capture has seen no such thing."""
    with pytest.raises(OptimizerInBackwardError):
        applied(LoggedAfter)


def test_fewer_updates_than_planned_are_said(applied: Applied) -> None:
    applied(Loop, 7)
    assert applied.notes and "6 of the 7 parameters" in applied.notes[0]


def test_what_came_of_them_is_told(applied: Applied) -> None:
    applied(Loop, 7)
    assert applied.account.as_dict() == {"planned": 7, "parameters": 6, "steps": 3, "ended": ""}
    applied(Clipped, 6)
    assert applied.account.steps == 0 and "uses a gradient" in applied.account.ended


def test_an_optimizer_that_is_not_seen_is_said(applied: Applied) -> None:
    class Copied(Loop):
        def zero(self, step: int) -> None:
            super().zero(step)
            if step == 0:
                self.model, self.optimizers = copy.deepcopy((self.model, self.optimizers))

    assert same(applied(Copied).result(), Copied().run().result())
    assert not applied.early
    assert [note for note in applied.notes if "copied or unpickled" in note], applied.notes


def test_together_with_recomputation(applied: Applied) -> None:
    """What backward recomputes it does before the weights that it needs are updated."""
    drop = [OpOutput("aten.gelu.default", 0), OpOutput("aten.addmm.default", 0)]
    part = RecomputePart(groups=[RecomputeGroup("model", drop)])
    said: list[str] = []
    with AppliedEverywhere(part, said.append):
        found = applied(Loop).result()
    assert same(found, Loop().run().result())
    assert (applied.early, applied.notes, said) == (3 * 6, [], [])


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\nif p.grad is not None:\n    p.grad = None\n", 0),
        ("import torch\ntorch.autograd.grad(loss, x)\n", 0),
        ("def log(p):\n    return p.grad.norm()\n", 2),
        ("norm = sum(p.grad.norm() for p in ps if p.grad is not None)\n", 1),
        ("p.grad *= 2\n", 1),
        ("p.grad is None or (\n", 0),
    ],
)
def test_source_that_reads_gradients(tmp_path: Path, source: str, line: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert _first_read(path) == line
