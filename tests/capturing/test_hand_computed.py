"""Jobs small enough to work out on paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memplan.types.trace import Phase, Role
from tests.capturing.jobs import allocations, bytes_of, frees, operators, peak, record, sizes

BATCH, WIDTH, HIDDEN, OUT = 128, 64, 256, 10
INPUT = 4 * BATCH * WIDTH
ACTIVATION = 4 * BATCH * HIDDEN
OUTPUT = 4 * BATCH * OUT
FIRST, SECOND = 4 * WIDTH * HIDDEN, 4 * HIDDEN * OUT
WEIGHTS = FIRST + SECOND
LOSS = 4 + 4
"""And the gradient of the loss, which `backward` holds until it returns."""


def mlp() -> nn.Sequential:
    first, second = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, OUT, bias=False)
    return nn.Sequential(first, nn.ReLU(), second).cuda()


def train(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[], None]:
    def job() -> None:
        model = mlp()
        optim = optimizer(model.parameters())
        while True:
            x = torch.randn(BATCH, WIDTH).cuda()
            loss = model(x).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()

    return job


def test_the_peak_of_an_mlp_with_sgd() -> None:
    """It is reached in the backward of the activation: saved, incoming and outgoing gradient."""
    best, event = peak(record(train(lambda p: torch.optim.SGD(p, 0.1))))
    assert best == WEIGHTS + INPUT + LOSS + 3 * ACTIVATION + SECOND
    assert event.op == "aten.threshold_backward.default"
    assert event.phase == Phase.BACKWARD


def test_the_state_of_momentum_and_adam() -> None:
    momentum = record(train(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)))
    assert bytes_of(momentum, Role.OPTIMIZER_STATE) == WEIGHTS
    adam = record(train(torch.optim.AdamW))
    assert bytes_of(adam, Role.OPTIMIZER_STATE) == 2 * WEIGHTS
    best, _ = peak(adam)
    steady = 3 * WEIGHTS + INPUT + LOSS
    assert best == steady + 3 * ACTIVATION + SECOND


def test_gradients_and_parameters_are_told_apart() -> None:
    trace = record(train(lambda p: torch.optim.SGD(p, 0.1)), steps=2)
    assert bytes_of(trace, Role.PARAMETER) == WEIGHTS
    assert bytes_of(trace, Role.GRADIENT) == 2 * WEIGHTS
    assert bytes_of(trace, Role.INPUT) == 2 * INPUT


def test_the_temporaries_of_adam_on_a_device() -> None:
    """The multi-tensor path: one square root for every parameter, all alive together."""
    trace = record(train(torch.optim.AdamW), steps=1)
    made = allocations(trace, Phase.OPTIMIZER, op="_foreach_sqrt")
    assert sorted(event.bytes for event in made) == sorted([FIRST, SECOND])
    ends = frees(trace)
    assert min(ends[event.storage] for event in made) > max(event.index for event in made)


def test_forward_requests_in_order() -> None:
    trace = record(train(lambda p: torch.optim.SGD(p, 0.1)), steps=1)
    assert sizes(trace, Phase.SETUP)[:2] == [FIRST, SECOND]
    loss_and_its_gradient = [4, 4]
    forward = [ACTIVATION, ACTIVATION, OUTPUT, OUTPUT, *loss_and_its_gradient]
    assert sizes(trace, Phase.FORWARD) == forward
    assert operators(trace, Phase.FORWARD)["mm"] == 2


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_accumulation_adds_into_the_first_gradient(micro_batches: int) -> None:
    def job() -> None:
        model = mlp()
        optim = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            for _ in range(micro_batches):
                model(torch.randn(BATCH, WIDTH, device="cuda")).mean().backward()
            optim.step()
            optim.zero_grad()

    trace = record(job, steps=2)
    assert operators(trace, Phase.BACKWARD)["add_"] == 2 * 2 * (micro_batches - 1)
    assert bytes_of(trace, Role.GRADIENT) == 2 * WEIGHTS


def test_gradients_kept_as_zeros() -> None:
    def job() -> None:
        model = mlp()
        optim = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(BATCH, WIDTH, device="cuda")).mean().backward()
            optim.step()
            optim.zero_grad(set_to_none=False)

    assert bytes_of(record(job, steps=3), Role.GRADIENT) == WEIGHTS


def test_a_steady_job_stops_by_itself() -> None:
    trace = record(train(lambda p: torch.optim.SGD(p, 0.1)))
    assert trace.meta.optimizer_steps == 3
    assert "same memory" in trace.meta.stop_reason


def test_weights_that_are_updated_on_the_host_stay_weights() -> None:
    """As under ZeRO whose optimizer is on the host: it steps others, and copies them over."""

    def job() -> None:
        model = mlp()
        frozen = next(model[2].requires_grad_(False).parameters())
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
        while True:
            model(torch.ones(BATCH, WIDTH).cuda()).sum().backward()
            frozen.data.copy_(torch.ones(frozen.shape))
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job, steps=2)
    assert bytes_of(trace, Role.PARAMETER) == WEIGHTS
    assert bytes_of(trace, Role.INPUT) == 2 * INPUT
