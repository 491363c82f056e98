"""Random draws are the same when they are drawn again, and the generator ends where it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memplan.runtime.tape import recording
from memplan.runtime.tape.replayable import traits_of
from memplan.types.errors import RecomputeError
from tests.runtime.harness import Job, check, everything, naive_way_fails, outcome


class Net(nn.Module):
    """Two layers with something random between them."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        x = self.noise(torch.tanh(self.first(x)))
        return self.noise(torch.sigmoid(self.second(x)))


def step(model: Any) -> list[Any]:
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss, x.grad, torch.rand(3)]


OWN = torch.Generator()
OTHER = torch.Generator()


def own_step(model: Any) -> list[Any]:
    OWN.manual_seed(5)
    OTHER.manual_seed(6)
    return [*step(model), OWN.get_state(), OTHER.get_state()]


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        x = functional.dropout(x)
    return functional.dropout(x)


def sampled(x: Tensor) -> Tensor:
    return torch.cos(x[torch.multinomial(x.detach().abs().sum(1) + 0.1, 6)])


GLOBAL: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": functional.dropout,
    "dropout in place": lambda x: functional.dropout(2 * x, inplace=True),
    "feature dropout": lambda x: functional.dropout1d(x),
    "alpha dropout": nn.AlphaDropout(0.3),
    "feature alpha dropout": nn.FeatureAlphaDropout(0.3),
    "rrelu": lambda x: functional.rrelu(x - 0.3, training=True),
    "rrelu in place": lambda x: functional.rrelu(x - 0.3, training=True, inplace=True),
    "rand": lambda x: torch.exp(x * torch.rand(x.shape)),
    "randn_like": lambda x: torch.sin(x + 0.1 * torch.randn_like(x)) * x,
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "bernoulli of probabilities": lambda x: torch.bernoulli(x.detach().abs()) * x,
    "normal of means": lambda x: torch.normal(x.detach(), 0.1) * x.exp(),
    "randint": lambda x: x * torch.randint(0, 3, x.shape),
    "randperm": lambda x: torch.tanh(x[torch.randperm(len(x))]) * x,
    "multinomial": sampled,
    "poisson": lambda x: torch.poisson(x.detach().abs()) * x,
    "exponential_": lambda x: x * torch.zeros_like(x).exponential_(),
    "gumbel softmax": lambda x: functional.gumbel_softmax(x, hard=True) * x,
    "reparametrised gamma": lambda x: torch.distributions.Gamma(x.abs() + 1, 1.0).rsample().log(),
    "fork_rng": forked,
}
OF_ITS_OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a generator": lambda x: x * torch.rand(x.shape, generator=OWN).exp(),
    "two generators": lambda x: (
        x * torch.empty_like(x).bernoulli_(0.5, generator=OWN)
        + x.exp() * torch.randn(x.shape, generator=OTHER)
        + functional.dropout(x)
    ),
    "multinomial from a generator": lambda x: (
        x[torch.multinomial(torch.ones(len(x)), 6, generator=OWN)] * x
    ),
}


@pytest.mark.parametrize("noise", GLOBAL.values(), ids=GLOBAL.keys())
def test_draws_of_the_default_generator(noise: Callable[[Tensor], Tensor]) -> None:
    check(Job(lambda: Net(noise), step))


@pytest.mark.parametrize("noise", OF_ITS_OWN.values(), ids=OF_ITS_OWN.keys())
def test_draws_of_other_generators(noise: Callable[[Tensor], Tensor]) -> None:
    job = Job(lambda: Net(noise), own_step)
    assert naive_way_fails(job)  # PyTorch's checkpoint restores the default generators only
    check(job)


def test_without_the_generators_state_the_checksum_stops_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(lambda: Net(functional.dropout), step)
    decisions = everything(job)
    monkeypatch.setattr(recording, "traits_of", lambda f: replace(traits_of(f), random=False))
    with pytest.raises(RecomputeError, match="gave other values"):
        outcome(job, decisions)


def test_a_permutation_drawn_anew_does_not_pass_the_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(lambda: Net(GLOBAL["randperm"]), step)
    decisions = everything(job)
    monkeypatch.setattr(recording, "traits_of", lambda f: replace(traits_of(f), random=False))
    with pytest.raises(RecomputeError, match="gave other values"):
        outcome(job, decisions)
