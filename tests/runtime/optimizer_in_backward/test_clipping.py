"""Gradients that are clipped by value: each before its update in backward, to the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan.runtime.in_effect import plan_in_effect
from memplan.runtime.optimizer_in_backward import preconditions, updates
from memplan.types.errors import OptimizerInBackwardError
from memplan.types.plan import OrderPart, Plan

VALUE = 0.01


@pytest.fixture(autouse=True)
def other_tests_are_no_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "reads_gradients", lambda: "")
    monkeypatch.setattr(preconditions, "has_compiled", lambda: False)


def trained(
    *,
    planned: float | None = None,
    values: tuple[float, ...] = (VALUE,) * 4,
    again: float = 0.0,
    foreach: bool | None = None,
    some: bool = False,
) -> tuple[list[Tensor], int, list[str]]:
    """Weights and state, the number of steps with updates in backward, and what was said."""
    said: list[str] = []
    part = OrderPart(
        parameters=5, gradient_bytes=0, from_first=True, clips=True, clip_value=planned or 0.0
    )
    plan = plan_in_effect(Plan(order=part), [], lambda _part, text: said.append(text))
    torch.manual_seed(0)
    with plan if planned is not None else nullcontext() as found:
        layers = [nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8, bias=False), nn.LayerNorm(8)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for value in values:
            model(torch.randn(6, 8)).square().mean().backward()
            clipped = list(model.parameters())[1 if some else 0 :]
            if value:
                nn.utils.clip_grad_value_(clipped, value, foreach=foreach)
            if again:
                nn.utils.clip_grad_value_(clipped, again, foreach=foreach)
            optimizer.step()
            optimizer.zero_grad()
    state: list[Any] = [v for p in model.parameters() for v in optimizer.state[p].values()]
    steps = found.in_backward.steps if found is not None and found.in_backward else 0
    return [*(one.detach() for one in model.parameters()), *state], steps, said


@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_same_bits(foreach: bool | None) -> None:
    plain, _, _ = trained(foreach=foreach)
    planned, steps, said = trained(planned=VALUE, foreach=foreach)
    assert steps == 4 and not said
    assert all(map(torch.equal, plain, planned))
    unclipped, _, _ = trained(values=(0.0,) * 4)
    assert not all(map(torch.equal, plain, unclipped)), "it makes a difference"


@pytest.mark.parametrize(
    ("values", "some"), [((VALUE, 0.0), False), ((VALUE, 0.02), False), ((VALUE,), True)]
)
def test_a_step_that_clips_otherwise_ends_the_job(values: tuple[float, ...], some: bool) -> None:
    with pytest.raises(OptimizerInBackwardError, match="not all clipped"):
        trained(planned=VALUE, values=values, some=some)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("first", "again"), [(VALUE, 1.0), (1.0, VALUE)])
def test_the_smaller_of_two_values_counts(first: float, again: float, foreach: bool) -> None:
    values = (first,) * 4
    plain, _, _ = trained(values=values, again=again, foreach=foreach)
    planned, steps, _ = trained(planned=VALUE, values=values, again=again, foreach=foreach)
    assert steps == 4 and all(map(torch.equal, plain, planned))
    with pytest.raises(OptimizerInBackwardError, match="not all clipped"):
        trained(planned=1.0, values=values, again=again, foreach=foreach)


def test_a_plan_without_the_value_leaves_updates_to_the_step() -> None:
    plain, _, _ = trained()
    planned, steps, said = trained(planned=0.0)
    assert not steps and "does not say to what" in said[0]
    assert all(map(torch.equal, plain, planned))
