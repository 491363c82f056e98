"""Optimizers of PyTorch, as each parameter is updated when its gradient is there: weights and state
are the plain loop's bits."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import memplan
from memplan.runtime.graph import step_capture
from memplan.runtime.graph.ordering import choose_order
from memplan.runtime.graph.updates import Updates
from memplan.runtime.one_update import each_by_itself
from memplan.types.errors import UsageError
from tests.runtime.graph.training import (
    Job,
    assert_as_plain,
    assert_captured,
    batches,
    captures_steps,
    classifier,
    perceptron,
)

pytestmark = captures_steps

Make = Callable[[nn.Module], Any]


def of(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """A rate and a decay for each kind of parameter."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    rest = [one for one in model.parameters() if one.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": rest, "lr": 0.02, "betas": (0, 0.5)},
        ],
        lr=0.01,
    )


def several(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [one for one in model.parameters() if one.dim() > 1]
    rest = [one for one in model.parameters() if one.dim() <= 1]
    return [torch.optim.Adam(matrices, 0.01), torch.optim.SGD(rest, 0.1, momentum=0.9)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    rest = [one for one in model.parameters() if one.dim() != 2]
    matrices = [one for one in model.parameters() if one.dim() == 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]


OPTIMIZERS: dict[str, Make] = {
    "sgd": of(torch.optim.SGD, lr=0.1),
    "sgd foreach": of(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": of(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "sgd nesterov": of(
        torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False
    ),
    "sgd dampening, maximize": of(
        torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.1, maximize=True
    ),
    "adam": of(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "adam foreach": of(torch.optim.Adam, lr=0.01, weight_decay=0.1, foreach=True),
    "adam fused": of(torch.optim.Adam, lr=0.01, weight_decay=0.1, fused=True),
    "adam capturable": of(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False),
    "adamw": of(torch.optim.AdamW, lr=0.01),
    "adamw fused amsgrad": of(torch.optim.AdamW, lr=0.01, amsgrad=True, fused=True),
    "adamw foreach amsgrad": of(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=True),
    "adamax": of(torch.optim.Adamax, lr=0.01),
    "adagrad": of(torch.optim.Adagrad, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "adagrad fused": of(torch.optim.Adagrad, lr=0.01, fused=True),
    "rmsprop": of(torch.optim.RMSprop, lr=0.001, momentum=0.5, centered=True),
    "adadelta": of(torch.optim.Adadelta),
    "nadam": of(torch.optim.NAdam, lr=0.001, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": of(torch.optim.RAdam, lr=0.01),
    "asgd": of(torch.optim.ASGD, lr=0.01, lambd=0.1),
    "rprop": of(torch.optim.Rprop),
    "adafactor": of(torch.optim.Adafactor, lr=0.01),
    "groups": groups,
    "several": several,
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = muon


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_the_plain_loop(name: str) -> None:
    step, job = assert_as_plain(lambda: classifier(make=OPTIMIZERS[name], count=3))
    assert_captured(step, 3)
    for optimizer in job.optimizers:
        names = list(optimizer.state_dict()["state"])
        assert names == sorted(names)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="another PyTorch")
def test_a_rate_that_depends_on_the_shape() -> None:
    """Muon multiplies it by the root of rows through columns: of 4, 2 and 1 here. A warmup begins
    where all are zero."""

    def make() -> Job:
        tall = nn.Sequential(*(nn.Linear(2, rows, bias=False) for rows in (8, 4, 2)))
        optimizer = torch.optim.Muon(tall.parameters(), lr=0.0)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            return sum((one(x).square().sum() for one in tall), y.sum() * 0.0)

        def warm_up(number: int) -> None:
            optimizer.param_groups[0]["lr"] = 0.1 * number

        return Job(tall, [optimizer], loss_fn, batches((5, 2), count=3), warm_up)

    step, _ = assert_as_plain(make)
    assert_captured(step, 3)


def test_modules_that_a_search_imports_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """They register classes with abstract ones. SGD with momentum has a graph made in the second
    call, too."""
    order = choose_order

    def imports(*args: Any, **options: Any) -> Any:
        abc.ABCMeta("Registry", (), {}).register(type("Registered", (), {}))
        return order(*args, **options)

    monkeypatch.setattr(step_capture, choose_order.__name__, imports)
    step, _ = assert_as_plain(lambda: classifier(make=OPTIMIZERS["sgd nesterov"]))
    assert_captured(step, 4)


@pytest.mark.parametrize("name", ["sgd nesterov", "adam foreach", "adamw fused amsgrad", "groups"])
def test_gradients_are_there_until_the_next_call(name: str) -> None:
    step, _ = assert_as_plain(
        lambda: classifier(make=OPTIMIZERS[name], count=3), keep_gradients=True
    )
    assert_captured(step, 3)


class OfTheUser(torch.optim.SGD):
    """Looks at all gradients before it uses any."""

    def step(self, closure: Any = None) -> Any:
        every = [one.grad for group in self.param_groups for one in group["params"]]
        norm = torch.stack([one.norm() for one in every if one is not None]).norm()
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + norm.item())
        return super().step(closure)


def test_an_optimizer_of_the_user_runs_with_all_gradients_there() -> None:
    step, _ = assert_as_plain(lambda: classifier(make=of(OfTheUser)), keep_gradients=True)
    assert_captured(step, 4)


def moved(parameter: Tensor, gradient: Tensor) -> None:
    parameter.sub_(gradient, alpha=0.1)


class Compiling(torch.optim.Optimizer):
    """Compiles what it does to a parameter, as torchao's optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            torch.compile(moved, fullgraph=True, backend="eager")(parameter, parameter.grad)


def test_an_optimizer_that_compiles_its_updates() -> None:
    """What is compiled for the first time under a dispatch mode never is again."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    step = memplan.compile(lambda x: model(x).sum(), optimizer=Compiling(model.parameters()))
    for _ in range(2):
        step(torch.ones(2, 3))
    assert_captured(step, 2)


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_by_foreach_sees_all_parameters_at_once(foreach: bool) -> None:
    """On a GPU its norms are reduced in an order that depends on the list."""
    optimizer = torch.optim.Adafactor(nn.Linear(2, 2).parameters(), foreach=foreach)
    assert Updates([optimizer]).each_by_itself() != foreach


def test_lbfgs_says_what_it_wants() -> None:
    """Its step calls the loss again and again."""
    job = classifier(make=of(torch.optim.LBFGS))
    with pytest.raises(UsageError, match="LBFGS"):
        memplan.compile(job.loss_fn, optimizer=job.optimizers[0])


def test_step_hooks_are_called_once_for_each_step() -> None:
    calls: list[str] = []

    def make() -> Job:
        job = classifier()
        job.optimizers[0].register_step_pre_hook(lambda *_: calls.append("before"))
        job.optimizers[0].register_step_post_hook(lambda *_: calls.append("after"))
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)
    assert calls == ["before", "after"] * 8


def test_a_step_hook_that_comes_later_is_in_the_promise() -> None:
    """All gradients are then there at once."""

    def make() -> Job:
        job = classifier(make=of(torch.optim.AdamW, fused=True))

        def between(number: int) -> None:
            if number == 2:
                job.optimizers[0].register_step_post_hook(lambda *_: None)

        job.between = between
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4, programs=2)
    before, after = step.report().programs
    assert after.ordered_peak_bytes > before.ordered_peak_bytes


def test_momentum_that_comes_later_is_in_the_promise() -> None:
    """Its buffers are as large as the weights, and stay when it is switched off."""

    def make() -> Job:
        job = classifier(make=of(torch.optim.SGD, lr=0.1), count=6)

        def between(number: int) -> None:
            group = job.optimizers[0].param_groups[0]
            group["momentum"] = 0.9 if number in (2, 3) else 0.0
            group["lr"] = 0.1 * (number > 1)

        job.between = between
        return job

    step, job = assert_as_plain(make)
    assert_captured(step, 6, programs=2)
    before, after = (program.ordered_peak_bytes for program in step.report().programs)
    assert after - before >= sum(one.nbytes for one in job.model.parameters())


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules_work_from_outside(name: str) -> None:
    def make() -> Job:
        job = classifier()
        schedule = SCHEDULES[name](job.optimizers[0])
        job.between = lambda number: schedule.step() if number else None
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


def test_groups_that_are_changed_by_hand() -> None:
    def make() -> Job:
        job = classifier()

        def between(number: int) -> None:
            group = job.optimizers[0].param_groups[0]
            group["lr"] = 0.01 * (number + 1)
            group["weight_decay"] = 0.1 * number
            group["betas"] = (0.9 - 0.1 * number, 0.99)

        job.between = between
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


@pytest.mark.parametrize("keep", [False, True])
def test_a_group_that_is_added_later(keep: bool) -> None:
    def make() -> Job:
        model = perceptron()
        first, *rest = model.parameters()
        job = classifier(lambda: model, lambda _: torch.optim.Adam(rest, 0.01), count=5)

        def between(number: int) -> None:
            if number == 2:
                job.optimizers[0].add_param_group({"params": [first], "lr": 0.1})
            first.grad = None

        job.between = between
        return job

    assert_as_plain(make, keep_gradients=keep)


def test_states_that_are_loaded_between_calls() -> None:
    def make() -> Job:
        job = classifier(count=6)
        saved: list[Any] = []

        def between(number: int) -> None:
            if number == 2:
                states = job.model.state_dict(), job.optimizers[0].state_dict()
                saved.extend(torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, states))
            if number == 4:
                job.model.load_state_dict(saved[0])
                job.optimizers[0].load_state_dict(saved[1])

        job.between = between
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 6)


def test_an_optimizer_that_is_emptied_between_calls() -> None:
    def make() -> Job:
        job = classifier()
        job.between = lambda number: job.optimizers[0].state.clear() if number == 2 else None
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


def test_optimizers_that_share_parameters_both_update() -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        first = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return [first, torch.optim.Adam(model.parameters(), 1e-2)]

    assert_as_plain(lambda: classifier(make=make))


def test_parameters_that_change_their_group() -> None:
    def make() -> Job:
        job = classifier(make=of(torch.optim.Adam, lr=1e-2), count=6)
        groups = job.optimizers[0].param_groups

        def between(number: int) -> None:
            if number == 2:
                moved = groups[0]["params"].pop()
                job.optimizers[0].add_param_group({"params": [moved], "lr": 0.5})

        job.between = between
        return job

    assert_as_plain(make)


def test_parameters_that_the_model_has_anew_are_not_the_optimizer_s() -> None:
    def make() -> Job:
        job = classifier(make=of(torch.optim.Adam, lr=1e-2), count=6)
        model: Any = job.model

        def between(number: int) -> None:
            if number == 2:
                held = {name: one.clone() for name, one in model.state_dict().items()}
                model.load_state_dict(held, assign=True)
            if number == 4:
                job.optimizers[0].add_param_group({"params": [model[0].weight]})

        job.between = between
        return job

    assert_as_plain(make)


@pytest.mark.parametrize("when", [0, 2])
def test_parameters_that_share_memory_run_plainly(when: int) -> None:
    def make() -> Job:
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)]
        model = nn.Sequential(*layers)
        job = classifier(lambda: model, of(torch.optim.Adam, lr=1e-2))

        def between(number: int) -> None:
            if number == when:
                model[2].weight.data = model[0].weight.data

        job.between = between
        return job

    step, _ = assert_as_plain(make)
    assert "share memory" in step.report().fallback


def test_a_loss_of_optimizer_state_is_that_of_before_the_update() -> None:
    """In a graph, a weight's update could come before another operator reads its momentum."""

    def make() -> Job:
        job = classifier(perceptron, of(torch.optim.SGD, lr=0.1, momentum=0.9))
        (optimizer,), plain = job.optimizers, job.loss_fn

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            momenta = [one["momentum_buffer"] for one in optimizer.state.values()]
            return plain(x, y) + job.model(x).mean() * sum(one.sum() for one in momenta)

        job.loss_fn = loss_fn
        return job

    step, _ = assert_as_plain(make)
    assert "optimizer state" in step.report().fallback


def test_parameters_in_one_buffer_are_captured() -> None:
    """Apart from each other, as cuDNN wants a recurrent layer's."""

    def make() -> Job:
        job = classifier(make=of(torch.optim.Adam, lr=1e-2))
        parameters = list(job.model.parameters())
        flat = torch.cat([one.detach().reshape(-1) for one in parameters])
        for one, part in zip(
            parameters, flat.split([one.numel() for one in parameters]), strict=True
        ):
            one.data = part.view_as(one)
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


@pytest.mark.parametrize("of_class", [False, True])
def test_a_step_that_is_replaced_between_calls_runs(
    of_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.optim.AdamW.step

    def doubled(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad.mul_(2)
        before(optimizer)

    def make() -> Job:
        job = classifier()
        (optimizer,) = job.optimizers
        monkeypatch.setattr(torch.optim.AdamW, "step", before)

        def between(number: int) -> None:
            if number == 2:
                owner = torch.optim.AdamW if of_class else optimizer
                monkeypatch.setattr(
                    owner, "step", doubled if of_class else lambda: doubled(optimizer)
                )

        job.between = between
        return job

    step, _ = assert_as_plain(make)
    assert step.report().compiled_calls == 4


def test_schedulers_leave_updates_in_the_graph() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert each_by_itself(optimizer)


@pytest.mark.parametrize("name", ["step", "_init_group"])
def test_a_method_without_globals_is_a_replaced_one(name: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    setattr(optimizer, name, functools.partial(getattr(optimizer, name)))
    assert not each_by_itself(optimizer)


def test_parameters_that_begin_to_train_are_listed_last() -> None:
    def make() -> Job:
        job = classifier()
        first = next(job.model.parameters()).requires_grad_(False)
        job.between = lambda number: first.requires_grad_(number >= 2)
        return job

    assert_as_plain(make)
