"""A loss function that changes what the update uses: Dynamo lets side effects wait until a graph
has run, which would be after the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.runtime.graph.training import (
    Job,
    assert_as_plain,
    assert_captured,
    batches,
    captures_steps,
    perceptron,
)

Effect = Callable[[nn.Module, torch.optim.Optimizer], object]


def of_an_option(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def of_a_group_in_another_place(_: nn.Module, optimizer: Any) -> None:
    optimizer.groups_again[0].update(lr=optimizer.groups_again[0]["lr"] * 0.5)


def of_an_option_that_is_a_tensor(_: nn.Module, optimizer: Any) -> None:
    optimizer.groups_again[0]["lr"].mul_(0.5)


def of_the_list_of_parameters(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if len(optimizer.param_groups[0]["params"]) > 3:
        optimizer.param_groups[0]["params"].pop()


def of_all_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def of_a_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        for one in model.parameters():
            optimizer.state[one]["exp_avg"].zero_()


def of_gradients(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for one in model.parameters():
        one.grad = torch.ones_like(one)


def by_a_hook(model: nn.Module, _: torch.optim.Optimizer) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)


EFFECTS = {
    one.__name__: one
    for one in (
        of_an_option,
        of_a_group_in_another_place,
        of_an_option_that_is_a_tensor,
        of_the_list_of_parameters,
        of_all_state,
        of_a_moment,
        of_gradients,
        by_a_hook,
    )
}


def with_effect(effect: Effect) -> Job:
    model = perceptron()
    rate: Any = torch.tensor(0.01) if effect is of_an_option_that_is_a_tensor else 0.01
    optimizer: Any = torch.optim.Adam(model.parameters(), rate, foreach=False)
    optimizer.groups_again = list(optimizer.param_groups)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        effect(model, optimizer)
        return F.cross_entropy(model(x), y)

    return Job(model, [optimizer], loss_fn, batches((5, 6)))


@pytest.mark.parametrize("name", EFFECTS)
def test_changes_of_what_the_update_uses(name: str) -> None:
    assert_as_plain(lambda: with_effect(EFFECTS[name]))


def test_an_option_that_computes_what_it_is() -> None:
    def job() -> Job:
        held = [0.1]

        class Group(dict[str, Any]):
            def __getitem__(self, key: str) -> Any:
                return held[0] if key == "lr" else super().__getitem__(key)

        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.param_groups[0] = Group(optimizer.param_groups[0])

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            held[0] *= 0.5
            return F.cross_entropy(model(x), y)

        return Job(model, [optimizer], loss_fn, batches((5, 6)))

    assert_as_plain(job)


@captures_steps
@pytest.mark.parametrize(
    ("effect", "words"),
    [
        (of_an_option, "changes its optimizer"),
        (of_an_option_that_is_a_tensor, "among its optimizer's options"),
        (by_a_hook, "puts a hook on a tensor"),
    ],
)
def test_the_reasons(effect: Effect, words: str) -> None:
    assert words in assert_as_plain(lambda: with_effect(effect))[0].report().fallback


@captures_steps
def test_options_may_change_where_the_update_comes_after_the_graph() -> None:
    step, _ = assert_as_plain(lambda: with_effect(of_a_group_in_another_place), clip_grad_norm=1.0)
    assert not step.report().fallback


@captures_steps
def test_a_model_that_its_optimizer_knows_may_count_calls() -> None:
    def count(model: Any, _: torch.optim.Optimizer) -> None:
        model.calls += 1

    def job() -> Job:
        made = with_effect(count)
        made.optimizers[0].model = made.model  # type: ignore[attr-defined]
        made.model.calls = torch.tensor(0)
        return made

    assert not assert_as_plain(job)[0].report().fallback


@captures_steps
def test_options_may_be_read() -> None:
    """Before the parameters, and again after a change of them."""

    def job() -> Job:
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            scale = 1 + optimizer.param_groups[0]["lr"]
            return F.cross_entropy(model(x), y) * scale

        def between(number: int) -> None:
            optimizer.param_groups[0]["lr"] = 0.1 if number < 2 else 0.05

        return Job(model, [optimizer], loss_fn, batches((5, 6)), between)

    step, _ = assert_as_plain(job)
    assert_captured(step, calls=4, programs=2)


@captures_steps
def test_gradients_of_earlier_calls_are_the_reason() -> None:
    def job() -> Job:
        model = perceptron()
        weight: Any = next(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            return loss if weight.grad is None else loss * (1 + weight.grad.norm())

        return Job(model, [optimizer], loss_fn, batches((5, 6)))

    step, _ = assert_as_plain(job, accumulate=2)
    assert "reads a gradient of an earlier call" in step.report().fallback
