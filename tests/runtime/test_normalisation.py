"""Layers with statistics: they advance once, and whoever reads them sees what it saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from memplan.runtime.tape import recording
from memplan.runtime.tape.replayable import traits_of
from tests.runtime.harness import Job, check, everything, naive_way_fails, outcome


def step(model: Any) -> list[Any]:
    x = torch.randn(4, 6, 5, 5, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss, x.grad]


class Between(nn.Module):
    """A normalisation between two convolutions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(6, 6, 3), norm, nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


WITH_STATISTICS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(6),
    "cumulative average": lambda: nn.BatchNorm2d(6, momentum=None),
    "not affine": lambda: nn.BatchNorm2d(6, affine=False),
    "instance norm that tracks": lambda: nn.InstanceNorm2d(6, track_running_stats=True),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(6, 6, 1)),
    "spectral norm, the old one": lambda: nn.utils.spectral_norm(nn.Conv2d(6, 6, 1)),
    "lazy batch norm": lambda: nn.LazyBatchNorm2d(),
}
WITHOUT: dict[str, Callable[[], nn.Module]] = {
    "batch norm of the batch only": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "batch norm in evaluation": lambda: nn.BatchNorm2d(6).eval(),
    "instance norm": lambda: nn.InstanceNorm2d(6, affine=True),
    "group norm": lambda: nn.GroupNorm(3, 6),
    "layer norm": lambda: nn.LayerNorm([6, 3, 3]),
    "rms norm": lambda: nn.RMSNorm([3, 3]),
    "local response norm": lambda: nn.LocalResponseNorm(2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(6, 6, 1)),
    "weight norm, the old one": lambda: nn.utils.weight_norm(nn.Conv2d(6, 6, 1)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Conv2d(6, 6, 1)),
}


@pytest.mark.parametrize("norm", WITH_STATISTICS.values(), ids=WITH_STATISTICS.keys())
def test_statistics_advance_once(norm: Callable[[], nn.Module]) -> None:
    job = Job(lambda: Between(norm()), step)
    assert naive_way_fails(job)
    check(job)


@pytest.mark.parametrize("norm", WITHOUT.values(), ids=WITHOUT.keys())
def test_normalisations_without_statistics(norm: Callable[[], nn.Module]) -> None:
    check(Job(lambda: Between(norm()), step))


class ThreeModes(nn.Module):
    """One batch norm that is read, advanced and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None and variance is not None
        x = torch.tanh(self.scale(x) - mean.view(-1, 1, 1))
        x = torch.sigmoid(norm.eval()(x))
        x = torch.tanh(norm.train()(x) * variance.view(-1, 1, 1).exp())
        return torch.tanh(norm.eval()(x) - mean.view(-1, 1, 1)) * x


def test_statistics_read_before_and_after_they_advance() -> None:
    check(Job(ThreeModes, step))


def test_statistics_that_advance_between_forward_and_backward() -> None:
    class Frozen(Between):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.norm.eval()(torch.tanh(self.first(x))))

    def step(model: Any) -> list[Any]:
        x = torch.randn(4, 6, 5, 5, requires_grad=True)
        # The batch norm's backward reads the statistics too; sum() leaves it no say in the loss
        # that a replay of its output could hide behind.
        loss = model(x).square().mean()
        with torch.no_grad():
            model.norm.train()(torch.randn(4, 6, 3, 3))
        loss.backward()
        return [loss, x.grad]

    check(Job(lambda: Frozen(nn.BatchNorm2d(6)), step))


def test_without_scratch_statistics_would_advance_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda: Between(nn.BatchNorm2d(6)), step)
    plain, decisions = outcome(job), everything(job)
    monkeypatch.setattr(
        recording, "traits_of", lambda f: replace(traits_of(f), replayable=True, statistics=None)
    )
    found = outcome(job, decisions).differences(plain)
    assert found == ["state norm.running_mean", "state norm.running_var"]
