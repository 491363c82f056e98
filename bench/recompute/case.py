"""What is trained: a model, one batch, a loss, and the model as a chain of units.

The chain is for the baselines only. It computes what the module computes, from the same
submodules; `memplan` is given the unmodified module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

State = tuple[torch.Tensor, ...]
Unit = Callable[..., Any]
"""From the tensors that cross a cut to those that cross the next one; one tensor or a tuple."""


@dataclass(frozen=True)
class Training:
    """A model ready for a step on the CPU."""

    module: nn.Module
    inputs: State
    loss: Callable[[Any], torch.Tensor]
    """From the module's output to the scalar that is differentiated."""
    units: Sequence[Unit]
    """The module as a chain: the first takes `inputs`, the last gives the output for `loss`."""
    blocks: frozenset[int] = field(default_factory=frozenset)
    """Which units are the blocks that users checkpoint one by one."""

    def resident(self) -> list[torch.Tensor]:
        """What is alive before a step: weights, buffers, the batch and what the loss holds."""
        held = [value for value in vars(self.loss).values() if isinstance(value, torch.Tensor)]
        return [*self.module.parameters(), *self.module.buffers(), *self.inputs, *held]

    def step(self) -> torch.Tensor:
        """Forward and backward as users write them; the loss."""
        value = self.loss(self.module(*self.inputs))
        value.backward()
        return value.detach()


@dataclass(frozen=True)
class Case:
    """A named, seeded recipe of a `Training`."""

    name: str
    says: str
    """Configuration, input size and batch, in words."""
    build: Callable[[], Training]


class CrossEntropy:
    """Mean cross entropy against fixed random targets; takes logits or a model's output object."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        self.targets = torch.randint(classes, shape)

    def __call__(self, output: Any) -> torch.Tensor:
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return nn.functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())


class PixelCrossEntropy(CrossEntropy):
    """The same for images: classes are the second dimension."""

    def __call__(self, output: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, self.targets)
