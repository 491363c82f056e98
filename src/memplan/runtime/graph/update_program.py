"""A parameter's update as code of its own, of the operators that its optimizer runs.

The code frees each temporary after its last use, or works in place on it. Where the gradient is
nobody else's, its memory is a temporary, too. Most updates are pointwise: the new value of an
element depends on no other element. Such an update can run in chunks, so that its temporaries are
no larger than a chunk, and still in the processor's cache when the next operator reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memplan.runtime.graph.arithmetic import (
    DEVICE,
    GRADIENT,
    PARAMETER,
    Arithmetic,
    Ref,
    Token,
    meta_like,
)
from memplan.runtime.graph.execute import Executable
from memplan.runtime.graph.in_place import in_place
from memplan.runtime.graph.program import UPDATE, program_of

ELEMENTS = {"cpu": 2**20}
"""Elements of a chunk, by the kind of device: enough to make the start of an operator cheap."""
_ELEMENTS = 2**24


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    once: Executable
    """In chunks: updates state that is one number, such as the count of steps."""
    each: Executable
    """Updates the parameter, or a chunk of it, and its state."""
    counts: tuple[str, ...]
    """Keys of the state that `once` updates."""
    state: tuple[str, ...]
    """Keys of the state that `each` updates; in chunks, it has the parameter's shape."""
    size: int | None
    """Elements of a chunk; None where there are none."""

    def run(
        self,
        parameter: torch.Tensor,
        gradient: list[torch.Tensor],
        state: Mapping[str, Any],
        numbers: Sequence[float],
        *,
        within: bool = False,
    ) -> bool:
        """Update a parameter; `within` a graph's code. Without chunks, the gradient is taken out of
        its list and overwritten. False, and nothing is done, where chunks are impossible: the state
        has other strides than the parameter. Where only the gradient has, each chunk of it is
        copied."""
        held = [parameter, *(state[key] for key in self.state)]
        if self.size is None:
            run = self.each.within if within else self.each
            run([held[0], gradient.pop(), *held[1:], *numbers])
            return True
        held, taken = [held[0].detach(), *held[1:]], gradient[0]
        if any(one.shape != parameter.shape for one in (*held, taken)):
            return False
        if not all(one.is_contiguous() for one in (*held, taken)):
            order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
            held, taken = [one.permute(order) for one in held], taken.permute(order)
            if not all(one.is_contiguous() for one in held):
                return False
        with torch.no_grad():
            self.once([*(state[key] for key in self.counts), *numbers])
            for first, of_chunk, *rest in _chunks([held[0], taken, *held[1:]], self.size):
                self.each([first, of_chunk.to(first.dtype).contiguous(), *rest, *numbers])
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


def update_program(
    arithmetic: Arithmetic, like: torch.Tensor, *, chunked: bool
) -> UpdateProgram | None:
    """The update of a parameter such as `like`; None where it shall be `chunked`, but is not
    pointwise."""
    state = dict(zip(arithmetic.state, arithmetic.initial_state, strict=True))
    counts = {key: one for key, one in state.items() if chunked and not one.shape}
    rest = {key: one for key, one in state.items() if key not in counts}
    if chunked and not (like.dim() and all(one.shape == like.shape for one in rest.values())):
        return None
    numbers = len(arithmetic.numbers)
    once, each = _Part(like, counts, numbers), _Part(like, rest, numbers, updates=True)
    for number, operation in enumerate(arithmetic.operations):
        result = arithmetic.results[number]
        part = once if chunked and not result.dim() else each
        pointwise = torch.Tag.pointwise in operation.func.tags and part.holds(operation.arguments)
        if chunked and not (pointwise and result.shape in ((), like.shape)):
            return None
        leaves = [part.argument(leaf) for leaf in operation.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, operation.spec)
        part.nodes["made", number, 0] = part.call(operation.func, args, kwargs, result)
    size = ELEMENTS.get(like.device.type, _ELEMENTS) if chunked else None
    code = each.executable(*([] if chunked else [each.nodes[GRADIENT]]))
    return UpdateProgram(once.executable(), code, tuple(counts), tuple(rest), size)


class _Part:
    def __init__(
        self,
        like: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        numbers: int,
        *,
        updates: bool = False,
    ) -> None:
        """`updates`: the part is given the parameter and its gradient, too."""
        self.graph = fx.Graph()
        self.device = like.device
        tensors = (PARAMETER, GRADIENT) if updates else ()
        given: dict[Token, Any] = dict.fromkeys(tensors, meta_like(like))
        given |= {("state", key): one for key, one in state.items()}
        given |= {("number", number): None for number in range(numbers)}
        self.nodes: dict[Token, fx.Node] = {}
        for token, val in given.items():
            node = self.nodes[token] = self.graph.placeholder("_".join(map(str, token)))
            node.meta["val"] = val

    def call(self, target: Any, args: Any, kwargs: Any, val: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {"val": val, UPDATE: True}
        return node

    def holds(self, arguments: Sequence[Any]) -> bool:
        """Whether all tensors and numbers among an operator's arguments are in this part."""
        refs = (one.token for one in arguments if isinstance(one, Ref))
        return all(token == DEVICE or token in self.nodes for token in refs)

    def argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        return self.device if leaf.token == DEVICE else self.nodes[leaf.token]

    def executable(self, *spare: fx.Node) -> Executable:
        """`spare`: inputs that may be overwritten."""
        self.graph.output(())
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        program = in_place(program_of(module), spare)
        inputs = program.placeholders
        order = [node for node in module.graph.nodes if node not in (*inputs, program.output)]
        return Executable(order, inputs, program.output, grad_mode=False, whole_step=True)
