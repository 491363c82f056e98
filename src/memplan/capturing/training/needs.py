"""What a training needs where its backward passes begin, to tell one that needs more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from memplan.capturing.recording.recorder import Recorder

MORE = 1 << 20
"""A training that needs so many bytes more is followed, too."""


class Needs:
    """Compares a training with those before it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.optimizer_grows: Callable[[], int] = lambda: 0
        """Bytes of parameters that an optimizer trains now beyond those that any has trained."""
        self._forward_from: int | None = None
        """Bytes when these forward passes began."""
        self._models: WeakSet[torch.nn.Module] = WeakSet()
        """Those that ran with gradients."""
        self._trainable = 0
        """The most bytes of parameters with gradients in a model of these forward passes."""
        self._now = self._most = 0, 0, 0
        """Bytes when a backward pass began: in all, those that the forward passes since the last
        one had added, and those of parameters with gradients."""

    def forward(self, model: torch.nn.Module) -> None:
        """To be called for a model that runs with gradients."""
        if self._forward_from is None:
            self._recorder.flush()
            self._forward_from = self._recorder.live_bytes
        self._models.add(model)
        self._trainable = max(self._trainable, _trainable(model))

    def backward(self) -> None:
        """To be called where a backward pass begins."""
        alive = self._recorder.live_bytes
        begun = alive if self._forward_from is None else self._forward_from
        self._now = alive, alive - begun, self._trainable
        self._forward_from, self._trainable = None, 0

    def note(self) -> None:
        """The last backward pass is of a training that is followed."""
        most, others, trainable = map(max, self._now, self._most)
        self._most = most, others, trainable

    @property
    def are_more(self) -> bool:
        """Whether the training needs more memory than those before, or will with its state."""
        more = any(now > most + MORE for now, most in zip(self._now, self._most, strict=True))
        return more or self.optimizer_grows() > MORE

    @property
    def will_be_more(self) -> bool:
        """Whether the next training will need more for gradients and state, also where its
        optimizer is none of PyTorch's."""
        trainable = max(map(_trainable, self._models), default=0)
        return trainable > self._most[-1] + MORE or self.optimizer_grows() > MORE


def _trainable(model: torch.nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters() if one.requires_grad)
