"""What a step's updates add to its joint graph: nodes that take a gradient, and that read a number
or a state of the optimizer when they run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memplan.runtime.graph.program import Added
from memplan.runtime.graph.updates import Updates


class TakeGradient(Added):
    """Called with a parameter and its gradient."""

    __name__ = "take_gradient"
    writes = (0,)

    def __init__(self, updates: Updates, copies: bool) -> None:
        self._updates = updates
        self._copies = copies
        """Whether the gradient's memory is somebody else's too, or lies in another way than the
        parameter: AccumulateGrad copies it then."""
        self.can_wait = False
        """Whether the update is none the worse for coming later."""
        self.waits = False
        """Whether a later one does this update, too."""

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.hold(parameter, gradient)
        if self._updates.in_graph and self.waits:
            self._updates.update_later(parameter)
        elif self._updates.in_graph and self.can_wait:
            self._updates.update_all_that_wait(parameter)
        elif self._updates.in_graph:
            self._updates.update(parameter)

    def hold(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Accumulate it in `parameter.grad`."""
        before = parameter.grad
        if before is not None:
            before.add_(gradient)
        elif self._copies:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad = gradient


class Number(Added):
    """A Python number of an update."""

    __name__ = "number"
    brings = True

    def __init__(self, read: Callable[[int], float], index: int) -> None:
        self._read, self._index = read, index

    def __call__(self) -> float:
        return self._read(self._index)


class State(Added):
    """A tensor of a parameter's state."""

    __name__ = "state"
    brings = True

    def __init__(self, updates: Updates, parameter: torch.Tensor, key: str) -> None:
        self._updates, self._parameter, self._key = updates, parameter, key

    def __call__(self) -> torch.Tensor:
        return self._updates.state_of(self._parameter, self._key)
