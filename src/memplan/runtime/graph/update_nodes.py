"""Nodes that the optimizer's updates add to the graph of a step."""

from __future__ import annotations

import torch

from memplan.runtime.graph.program import MemplanOp
from memplan.runtime.graph.updates import Updates


class TakeGradient(MemplanOp):
    """Accumulates a gradient in its parameter and, where updates are part of the graph, runs the
    optimizer for it. Called with the parameter and the gradient, which it takes out of a list."""

    __name__ = "take_gradient"
    writes: tuple[int, ...] = (0,)
    takes = 1

    def __init__(self, updates: Updates, copies: bool) -> None:
        self._updates = updates
        self._copies = copies
        """Whether `parameter.grad` has to be a copy, as autograd's AccumulateGrad makes one where
        the gradient shares memory or has other strides than the parameter."""
        self.can_wait = False
        """Whether the update may be left to a later node of its group."""
        self.waits = False
        """Whether a later node does this update."""

    def __call__(self, parameter: torch.Tensor, gradient: list[torch.Tensor]) -> None:
        self.hold(parameter, gradient.pop())
        if self._updates.in_graph and self.waits:
            self._updates.postpone(parameter)
        elif self._updates.in_graph and self.can_wait:
            self._updates.update_with_postponed(parameter)
        elif self._updates.in_graph:
            self._updates.update(parameter, within=True)

    def hold(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Accumulate the gradient in `parameter.grad`."""
        before = parameter.grad
        if before is not None:
            before.add_(gradient)
        elif self._copies:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad = gradient
