"""Autocast: the casts of forward are repeated as they were, whatever is on during backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.harness import Job, check, naive_way_fails


def bf16(enabled: bool = True) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.norm, self.third = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with bf16(False):
            x = torch.sin(self.second(x.float()))
        with bf16():
            x = self.second(x).exp().float()
        x = nn.functional.dropout(self.norm(x), 0.2)
        x = x.to(self.third.weight.dtype)
        return self.third(x) * torch.sigmoid(self.third(x))


def loss_of(model: Any) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 8, requires_grad=True)
    return model(x).float().square().mean(), x


def outside(model: Any) -> list[Any]:
    with bf16():
        loss, x = loss_of(model)
    loss.backward()
    return [loss, x.grad]


def backward_inside(model: Any) -> list[Any]:
    with bf16():
        loss, x = loss_of(model)
        loss.backward()
    return [loss, x.grad]


def backward_only(model: Any) -> list[Any]:
    loss, x = loss_of(model)
    with bf16():
        loss.backward()
    return [loss, x.grad]


def forward_twice(model: Any) -> list[Any]:
    """The cast of a weight is made once and used by both calls."""
    with bf16():
        one, x = loss_of(model)
        two, y = loss_of(model)
    two.backward()
    one.backward()
    return [one, two, x.grad, y.grad]


def loss_scaled(model: Any) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bf16():
        loss, x = loss_of(model)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return [loss, x.grad, *(p.detach() for p in model.parameters())]


STEPS = [outside, backward_inside, backward_only, forward_twice, loss_scaled]


@pytest.mark.parametrize("step", STEPS, ids=[step.__name__ for step in STEPS])
def test_autocast(step: Any) -> None:
    check(Job(Net, step))


def test_casts_that_the_program_switches_itself_are_not_made_anew() -> None:
    """`set_autocast_enabled` without a context manager: PyTorch's checkpoint notes the state at
    its beginning only, so what a module switches on the way stays on when it runs again."""
    runs: list[int] = []

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            runs.append(self.runs)
            with bf16(self.runs == 1):
                return torch.sin(self.layer(x).float()).exp()

    job = Job(Once, backward_only)
    assert naive_way_fails(job)
    check(job)
