"""The chain of units that the baselines cut computes what the unmodified model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.recompute import convnets, models, transformers
from bench.recompute.case import Training

SMALL = {
    "vgg": lambda: convnets.vgg("vgg11", 2, 32),
    "resnet": lambda: convnets.resnet("resnet50", 2, 32),
    "densenet": lambda: convnets.densenet("densenet121", 2, 32),
    "inception": lambda: convnets.inception(2, 75),
    "u-net": lambda: convnets.unet(2, 32, 4, 2),
    "gpt-2": lambda: transformers.gpt2(2, 16, 2, 64),
    "llama": lambda: transformers.llama(2, 16, 2, 128),
    "vit": lambda: transformers.vit(2, 32, 8, 2, 64),
}


def through_units(training: Training) -> Any:
    state: Any = training.inputs
    for unit in training.units:
        state = unit(*(state if isinstance(state, tuple) else (state,)))
    return state


@pytest.mark.parametrize("name", SMALL)
def test_units_compute_what_the_module_does(name: str) -> None:
    torch.manual_seed(0)
    training = SMALL[name]()
    losses = []
    for run in (lambda: training.module(*training.inputs), lambda: through_units(training)):
        torch.manual_seed(1)  # dropout
        losses.append(training.loss(run()))
    assert torch.equal(*losses)
    assert training.blocks and max(training.blocks) < len(training.units)


def test_builds_are_seeded() -> None:
    first, second = models.build("resnet-50"), models.build("resnet-50")
    assert torch.equal(first.inputs[0], second.inputs[0])
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_residents_include_the_targets() -> None:
    training = SMALL["u-net"]()
    assert any(t is training.loss.targets for t in training.resident())  # type: ignore[attr-defined]
