"""A parameter's update in pieces, so that its temporaries are no larger than a piece.

Most updates are pointwise: what they do to a part of a tensor does not depend on the rest. Adam's
denominator, for one, is then never there as a whole, and what an operator leaves is still in the
processor's cache when the next one reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memplan.runtime.graph.arithmetic import GRADIENT, PARAMETER, Arithmetic, Named, Token
from memplan.runtime.graph.in_place import twin_of

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
    size: int
    """Elements of a piece."""

    def run(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, Any],
        numbers: Sequence[float],
    ) -> bool:
        """Update a parameter. False where its state lies in another way than it does: then nothing
        is done. Of a gradient that does, each piece is copied."""
        held = [parameter.detach(), *(state[key] for key in self.state)]
        if any(one.shape != parameter.shape for one in (*held, gradient)):
            return False
        if not all(one.is_contiguous() for one in (*held, gradient)):
            order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
            held, gradient = [one.permute(order) for one in held], gradient.permute(order)
            if not all(one.is_contiguous() for one in held):
                return False
        with torch.no_grad():
            self.once(*(state[key] for key in self.counts), *numbers)
            for first, taken, *rest in _pieces([held[0], gradient, *held[1:]], self.size):
                self.each(first, taken.to(first.dtype).contiguous(), *rest, *numbers)
        return True


def _pieces(tensors: list[torch.Tensor], size: int) -> Iterable[Sequence[torch.Tensor]]:
    """Of tensors in rows; the second, a gradient, may lie in another way."""
    first, gradient = tensors[:2]
    if first.numel() <= size:
        return [tensors]
    if gradient.is_contiguous():
        tensors = [one.view(-1) for one in tensors]
    else:
        size = max(1, size // first[0].numel())
    return zip(*(one.split(size) for one in tensors), strict=True)


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
        node.meta["val"] = result
        part.nodes["made", number, 0] = node
    size = ELEMENTS.get(like.device.type, _ELEMENTS)
    return Pointwise(once.module(), each.module(), counts, state, size)


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
        self._write_temporaries_again()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _write_temporaries_again(self) -> None:
        """Where one is needed by one operator only, which would write new memory."""
        temporaries = set[fx.Node]()
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target._schema.is_mutable:
                continue
            twin, into = twin_of(node.target), node.args[0]
            if (
                twin is not None
                and into in temporaries
                and list(into.users) == [node]
                and into not in (*node.args[1:], *node.kwargs.values())
                and node.meta["val"].dtype == into.meta["val"].dtype
            ):
                node.target = twin
            temporaries.add(node)
