"""Nodes that the optimizer's updates add to the graph of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memplan.runtime.graph.program import MemplanOp
from memplan.runtime.graph.updates import Updates


class TakeGradient(MemplanOp):
    """Accumulates a gradient in its parameter and, where updates are part of the graph, runs the
    optimizer for it. Called with the parameter and the gradient."""

    __name__ = "take_gradient"
    writes = (0,)

    def __init__(self, updates: Updates, copies: bool) -> None:
        self._updates = updates
        self._copies = copies
        """Whether `parameter.grad` has to be a copy, as autograd's AccumulateGrad makes one where
        the gradient shares memory or has other strides than the parameter."""
        self.can_wait = False
        """Whether the update may be left to a later node of its group."""
        self.waits = False
        """Whether a later node does this update."""

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.hold(parameter, gradient)
        if self._updates.in_graph and self.waits:
            self._updates.postpone(parameter)
        elif self._updates.in_graph and self.can_wait:
            self._updates.update_with_postponed(parameter)
        elif self._updates.in_graph:
            self._updates.update(parameter)

    def hold(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Accumulate the gradient in `parameter.grad`."""
        before = parameter.grad
        if before is not None:
            before.add_(gradient)
        elif self._copies:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad = gradient


class Number(MemplanOp):
    """Reads a Python number of an update, such as the learning rate."""

    __name__ = "number"
    is_input = True

    def __init__(self, read: Callable[[int], float], index: int) -> None:
        self._read, self._index = read, index

    def __call__(self) -> float:
        return self._read(self._index)


class State(MemplanOp):
    """Reads a tensor of a parameter's optimizer state."""

    __name__ = "state"
    is_input = True

    def __init__(self, updates: Updates, parameter: torch.Tensor, key: str) -> None:
        self._updates, self._parameter, self._key = updates, parameter, key

    def __call__(self) -> torch.Tensor:
        return self._updates.state_of(self._parameter, self._key)
