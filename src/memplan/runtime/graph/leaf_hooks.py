"""Finds hooks that autograd would run for the gradient of a step's input, but a graph would not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


class LeafHooks:
    """Leaves with their AccumulateGrad nodes, kept from call to call: to ask autograd again takes
    microseconds for each. Autograd creates a node when it needs one, and holds only a weak
    reference."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, list[Any]]] = {}
        """Each node, with what refers to its hooks."""

    def refusal(self, inputs: Iterable[Any]) -> str:
        """Why the gradient of some input cannot simply be stored; empty if all can.

        To be called while no graph of autograd uses these inputs.
        """
        before, self._held = self._held, {}
        for one in inputs:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                if one.grad_fn is not None:
                    return "an input that was computed from what requires a gradient"
                if one.layout is not torch.strided or one.is_nested:
                    return "a parameter or input that requires a gradient and is not dense"
                if one._backward_hooks or one._post_accumulate_grad_hooks:
                    return _HOOKED
                known = before.pop(id(one), None) or _accumulator(one)
                if any(known[1]):
                    del known
                    known = _accumulator(one)  # the same node if something else still holds it
                if any(known[1]):
                    return _HOOKED
                self._held[id(one)] = known
        return ""

    def forget(self) -> None:
        """Release the nodes before autograd runs: those that nothing else holds go, with hooks."""
        self._held.clear()


_HOOKED = "a hook on a parameter's gradient"


def _accumulator(leaf: torch.Tensor) -> tuple[Any, list[Any]]:
    node = get_gradient_edge(leaf).node
    found = []
    for register in (node.register_prehook, node.register_hook):
        # PyTorch lists no hooks of a node, but the handle of a new one refers to the list.
        handle = register(_nothing)
        found.append(handle.hooks_dict_ref())
        handle.remove()
    return node, found


def _nothing(*_gradients: Any) -> None:
    pass
