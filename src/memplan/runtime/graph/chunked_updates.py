"""A parameter's update in chunks, so that its temporaries are no larger than a chunk.

Most updates are pointwise: the new value of an element depends on no other element. In chunks,
Adam's denominator, for example, never exists as a whole, and a temporary is still in the
processor's cache when the next operator reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memplan.runtime.graph.arithmetic import GRADIENT, PARAMETER, Arithmetic, Ref, Token
from memplan.runtime.graph.in_place import in_place_variant

ELEMENTS = {"cpu": 2**20}
"""Elements of a chunk, by the kind of device: enough to make the start of an operator cheap."""
_ELEMENTS = 2**24


@dataclass(frozen=True, eq=False)
class ChunkedUpdate:
    """An update whose operators are pointwise."""

    once: fx.GraphModule
    """Updates state that is one number, such as the count of steps."""
    each: fx.GraphModule
    """Updates a chunk of the parameter and of its state."""
    counts: tuple[str, ...]
    """Keys of state that is one number."""
    state: tuple[str, ...]
    """Keys of state with the parameter's shape."""
    size: int
    """Elements of a chunk."""

    def run(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, Any],
        numbers: Sequence[float],
    ) -> bool:
        """Update a parameter. False, and nothing is done, where its state has other strides than
        the parameter. Where only the gradient has, each chunk of it is copied."""
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
            for first, taken, *rest in _chunks([held[0], gradient, *held[1:]], self.size):
                self.each(first, taken.to(first.dtype).contiguous(), *rest, *numbers)
        return True


def _chunks(tensors: list[torch.Tensor], size: int) -> Iterable[Sequence[torch.Tensor]]:
    """Chunks of contiguous tensors, of which the second one, a gradient, may have other strides."""
    first, gradient = tensors[:2]
    if first.numel() <= size:
        return [tensors]
    if gradient.is_contiguous():
        tensors = [one.view(-1) for one in tensors]
    else:
        size = max(1, size // first[0].numel())
    return zip(*(one.split(size) for one in tensors), strict=True)


def chunked_update(arithmetic: Arithmetic, like: torch.Tensor) -> ChunkedUpdate | None:
    """The update of a parameter such as `like` in chunks; None where it is not pointwise."""
    shapes = {
        key: one.shape for key, one in zip(arithmetic.state, arithmetic.initial_state, strict=True)
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
    return ChunkedUpdate(once.module(), each.module(), counts, state, size)


class _Part:
    def __init__(self, given: Sequence[Token]) -> None:
        self.graph = fx.Graph()
        self.nodes = {one: self.graph.placeholder("_".join(map(str, one))) for one in given}

    def holds(self, arguments: Sequence[Any]) -> bool:
        """Whether all arguments of an operator are in this part."""
        return all(one.token in self.nodes for one in arguments if isinstance(one, Ref))

    def argument(self, leaf: Any) -> Any:
        return self.nodes[leaf.token] if isinstance(leaf, Ref) else leaf

    def module(self) -> fx.GraphModule:
        self.graph.output(())
        self._reuse_temporaries()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _reuse_temporaries(self) -> None:
        """Let an operator work in place on a temporary that no other operator uses."""
        temporaries = set[fx.Node]()
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target._schema.is_mutable:
                continue
            variant, into = in_place_variant(node.target), node.args[0]
            if (
                variant is not None
                and into in temporaries
                and list(into.users) == [node]
                and into not in (*node.args[1:], *node.kwargs.values())
                and node.meta["val"].dtype == into.meta["val"].dtype
            ):
                node.target = variant
            temporaries.add(node)
