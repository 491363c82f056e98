"""The baselines are the real thing: PyTorch's cuts, its peaks, and the plain run's gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from bench.recompute import baselines, convnets, transformers
from bench.recompute.baselines import Segment
from bench.recompute.case import Training
from bench.recompute.tracker import Peak, measure


def peak(training: Training, step: Callable[[], object]) -> Peak:
    training.module.zero_grad(set_to_none=True)
    return measure(step, training.resident(), training.module.parameters())


def gradients(training: Training, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    training.module.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = step()
    return [loss, *(p.grad for p in training.module.parameters() if p.grad is not None)]


def test_cuts() -> None:
    assert baselines.sequential(7, 3) == [
        Segment(0, 2, True),
        Segment(2, 4, True),
        Segment(4, 7, False),
    ]
    assert baselines.sequential(7, 1) == [Segment(0, 7, False)]
    assert baselines.sqrt_n(10) == [Segment(0, 3, True), Segment(3, 6, True), Segment(6, 10, True)]


@pytest.mark.parametrize("segments", [1, 2, 9])
def test_the_same_peak_as_checkpoint_sequential(segments: int) -> None:
    torch.manual_seed(0)
    training = convnets.resnet("resnet50", 2, 32)
    modules = nn.Sequential(*(cast(nn.Module, unit) for unit in training.units))

    def forward() -> torch.Tensor:
        images = training.inputs[0]
        return checkpoint_sequential(modules, segments, images, use_reentrant=False)

    def theirs() -> torch.Tensor:
        value = training.loss(forward())
        value.backward()
        return value

    cut = baselines.sequential(len(training.units), segments)
    ours = peak(training, lambda: baselines.step(training, cut))
    assert ours == peak(training, theirs)


@pytest.mark.parametrize("name", ["densenet", "u-net", "gpt-2", "llama"])
def test_gradients_are_those_of_the_plain_run_and_the_peak_is_lower(name: str) -> None:
    torch.manual_seed(0)
    training = {
        "densenet": lambda: convnets.densenet("densenet121", 2, 64),
        "u-net": lambda: convnets.unet(2, 64, 8, 2),
        "gpt-2": lambda: transformers.gpt2(2, 64, 4, 64),
        "llama": lambda: transformers.llama(2, 64, 4, 128),
    }[name]()
    plain = gradients(training, training.step)
    plain_peak = peak(training, training.step)
    for cut in (baselines.sqrt_n(len(training.units)), baselines.per_block(training)):
        step = functools.partial(baselines.step, training, cut)
        assert all(map(torch.equal, plain, gradients(training, step)))
        assert peak(training, step).activation_bytes < plain_peak.activation_bytes
