"""A parameter's update in pieces, so that its temporaries are no larger than a piece.

Most updates are pointwise: what they do to a part of a tensor does not depend on the rest. Adam's
denominator, for one, is then never there as a whole, and what an operator leaves is still in the
processor's cache when the next one reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memplan.runtime.graph.arithmetic import GRADIENT, PARAMETER, Arithmetic, Named, Token

_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default

ELEMENTS = {"cpu": 2**20}
"""Of a piece, by the kind of device: so many that starting an operator costs little."""
_ELEMENTS = 2**24


@dataclass(frozen=True, eq=False)
class Pointwise:
    """An update whose operators are pointwise."""

    once: fx.GraphModule
    """What becomes of state that is one number, such as a count of steps."""
    each: fx.GraphModule
    """What becomes of a piece. Both take the parameter, the gradient, the state and the numbers."""
    counts: tuple[str, ...]
    """Keys of state that is one number."""
    state: tuple[str, ...]
    """Keys of state that lies as the parameter does."""

    def run(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, Any],
        numbers: Sequence[float],
    ) -> bool:
        """Update a parameter. False where the tensors lie in other ways: then nothing is done."""
        tensors = [parameter.detach(), gradient, *(state[key] for key in self.state)]
        if not _alike(tensors):
            return False
        with torch.no_grad():
            self.once(*(state[key] for key in self.counts), *numbers)
            if parameter.numel() <= elements(parameter):
                self.each(*tensors, *numbers)
                return True
            flat = (one.as_strided((one.numel(),), (1,)) for one in tensors)
            for pieces in zip(*(one.split(elements(one)) for one in flat), strict=True):
                self.each(*pieces, *numbers)
        return True

    def without_memory(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """What `each` takes, numbers apart: a piece of the parameter and so on."""
        count = min(parameter.numel(), elements(parameter))
        return [
            torch.empty(count, dtype=parameter.dtype, device="meta")
            for _ in range(2 + len(self.state))
        ]

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether this is for the parameter, where its gradient and its state lie as it does."""
        return _alike([parameter])


def elements(like: torch.Tensor) -> int:
    """Of a piece of a tensor."""
    return ELEMENTS.get(like.device.type, _ELEMENTS)


def pointwise(arithmetic: Arithmetic, like: torch.Tensor) -> Pointwise | None:
    """The update of a parameter such as `like`; None where it is not pointwise."""
    shapes = {
        key: one.shape for key, one in zip(arithmetic.state, arithmetic.begins_with, strict=True)
    }
    counts = tuple(key for key, shape in shapes.items() if not shape)
    state = tuple(key for key in shapes if key not in counts)
    if not like.dim() or any(shapes[key] != like.shape for key in state):
        return None
    numbers: list[Token] = [("number", number) for number in range(len(arithmetic.numbers))]
    once = _Part([*(("state", key) for key in counts), *numbers])
    each = _Part([PARAMETER, GRADIENT, *(("state", key) for key in state), *numbers])
    for number, operation in enumerate(arithmetic.operations):
        result = arithmetic.results[number]
        part = each if result.dim() else once
        if torch.Tag.pointwise not in operation.func.tags or not part.holds(operation.arguments):
            return None
        if part is each and result.shape != like.shape:
            return None
        leaves = [part.argument(leaf) for leaf in operation.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, operation.spec)
        node = part.graph.call_function(operation.func, args, kwargs)
        part.nodes["made", number, 0] = node
    return Pointwise(once.module(), each.module(), counts, state)


class _Part:
    def __init__(self, given: Sequence[Token]) -> None:
        self.graph = fx.Graph()
        self.nodes = {one: self.graph.placeholder("_".join(map(str, one))) for one in given}

    def holds(self, arguments: Sequence[Any]) -> bool:
        """Whether an operator uses nothing of the other part."""
        return all(one.token in self.nodes for one in arguments if isinstance(one, Named))

    def argument(self, leaf: Any) -> Any:
        return self.nodes[leaf.token] if isinstance(leaf, Named) else leaf

    def module(self) -> fx.GraphModule:
        self.graph.output(())
        return fx.GraphModule(torch.nn.Module(), self.graph)


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they lie in the same way, without gaps where they are to be taken in pieces."""
    first = tensors[0]
    same = all(one.shape == first.shape and one.stride() == first.stride() for one in tensors)
    small = first.numel() <= elements(first)
    return same and (small or bool(_is_dense(first)))
