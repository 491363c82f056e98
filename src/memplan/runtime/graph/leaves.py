"""What autograd would do with the gradient of a step's input that a graph does not do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge


class _Accumulator(NamedTuple):
    """The node that autograd ends in at a leaf, and its hooks. Autograd makes it when it needs one,
    and holds it weakly."""

    node: Any
    hooks: tuple[Any, ...]

    @property
    def hooked(self) -> bool:
        return any(self.hooks)


class Leaves:
    """Parameters, with what is known of them from the last call: to ask autograd again takes
    microseconds each."""

    def __init__(self) -> None:
        self._held: dict[int, _Accumulator] = {}

    def refusal(self, inputs: Iterable[Any]) -> str:
        """What else would happen to an input's gradient than that it is kept; empty if nothing.
        To be asked while no graph of autograd's has these inputs."""
        before, self._held = self._held, {}
        for one in inputs:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                if one.grad_fn is not None:
                    return "an input that was computed from what requires a gradient"
                if one._backward_hooks or one._post_accumulate_grad_hooks:
                    return _HOOKED
                known = before.pop(id(one), None) or _accumulator(one)
                if known.hooked:
                    del known
                    known = _accumulator(one)  # the same where somebody else holds it
                if known.hooked:
                    return _HOOKED
                self._held[id(one)] = known
        return ""

    def forget(self) -> None:
        """Before autograd runs: a hook goes with its node where nobody else holds that."""
        self._held.clear()


_HOOKED = "a hook on a parameter's gradient"


def _accumulator(leaf: torch.Tensor) -> _Accumulator:
    node = get_gradient_edge(leaf).node
    found = []
    for register in (node.register_prehook, node.register_hook):
        # PyTorch has no list of a node's hooks, but each is told the one that it was put into.
        handle = register(_nothing)
        found.append(handle.hooks_dict_ref())
        handle.remove()
    return _Accumulator(node, tuple(found))


def _nothing(*_gradients: Any) -> None:
    pass
