"""A compiled region: forward, then whatever the caller does, then backward, as one graph.

One graph of both parts is ordered with its true peak: what forward saves is held in between, and
freed by the operator of backward that uses it last.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.runtime.graph.again import Again, saved_by
from memplan.runtime.graph.execute import Executable
from memplan.runtime.graph.joint import (
    Joint,
    add_backward,
    add_forward,
    constants,
    is_tangent,
    returned,
)
from memplan.runtime.graph.program import BACKWARD, Added
from memplan.types.errors import InternalError


class Between(Added):
    """The caller's turn: it has what forward returned, writes the inputs that forward changed, and
    comes back with gradients. Arguments: what forward returns, then those inputs."""

    __name__ = "between"
    barrier = True

    def __init__(self, changed: int) -> None:
        self.writes = tuple(range(1, 1 + changed))


class Accumulate(Added):
    """What becomes of gradients after backward. Autograd copies those that lie in another way than
    their input, one at a time."""

    __name__ = "accumulate"

    def __init__(self, scratch_bytes: int) -> None:
        self.scratch_bytes = scratch_bytes


@dataclass(frozen=True, eq=False)
class Region:
    """`module` has all nodes of both parts. The first argument of `between` is what forward
    returns, that of `accumulate` what backward does."""

    module: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    """As PyTorch's partitioner made them."""
    between: fx.Node
    accumulate: fx.Node
    saved: list[int]
    """Places among what forward returns, in the order of backward's inputs."""
    tangents: list[fx.Node]
    results: int

    def executables(self, order: Sequence[fx.Node]) -> tuple[Executable, Executable]:
        """Of both parts. `order`: as `Ordering.nodes`."""
        at = order.index(self.between)
        inputs = list(self.module.graph.find_nodes(op="placeholder"))
        after = [
            node
            for node in order[at + 1 :]
            if node is not self.accumulate and node not in self.tangents
        ]
        made: Any = self.between.args[0]
        received = [made[place] for place in self.saved]
        return (
            Executable(order[:at], inputs, self.between),
            Executable(after, [*received, *self.tangents], self.accumulate),
        )


def region(joint: Joint, replays: Sequence[Again] = (), *, saves: bool = True) -> Region:
    """Backward makes again what the replays say. `saves`: False leaves out that what backward
    needs is held in between, for those who are to choose what is."""
    forward, backward = joint.parts(replays)
    graph = fx.Graph()
    made = add_forward(graph, forward)
    places = list(backward.graph.find_nodes(op="placeholder"))
    given = [node for node in places if is_tangent(node)]
    outputs = list(returned(forward))
    saved = [outputs.index(node) for node in saved_by(forward, joint.results)]
    if places[len(saved) :] != given:
        raise InternalError("backward's inputs are not what forward saves, then gradients")
    inputs = graph.find_nodes(op="placeholder")
    changed = [node for node in inputs if node.name in joint.changed]
    leaves = tuple(made) if saves else tuple(made[: joint.results])
    between = graph.call_function(Between(len(changed)), (leaves, *changed))
    between.meta = {"val": [node.meta.get("val") for node in given], BACKWARD: False}
    tangents = []
    for number, node in enumerate(given):
        element = graph.call_function(operator.getitem, (between, number))
        element.meta = {"val": node.meta.get("val"), BACKWARD: False}
        tangents.append(element)
    gradients = add_backward(graph, backward, [*(made[place] for place in saved), *tangents])
    copied = [
        _bytes(gradient)
        for gradient, node in zip(gradients, joint.module.graph.nodes, strict=False)
        if isinstance(gradient, fx.Node) and not _lies_as(gradient, node)
    ]
    accumulate = graph.call_function(Accumulate(max(copied, default=0)), (tuple(gradients),))
    accumulate.meta = {"val": None, BACKWARD: True}
    # The caller may hold the results, and does hold what it came back with, until backward ends.
    graph.output((tuple(made[: joint.results]), tuple(tangents), tuple(gradients)))
    module = fx.GraphModule(constants(forward, backward), graph)
    return Region(module, forward, backward, between, accumulate, saved, tangents, joint.results)


def _lies_as(gradient: fx.Node, given: fx.Node) -> bool:
    """Whether autograd takes a gradient as it is."""
    val, of = gradient.meta["val"], given.meta["val"]
    if not isinstance(val, torch.Tensor):
        return True  # a mesh, say
    return isinstance(of, torch.Tensor) and val.stride() == of.stride() and val.dtype == of.dtype


def _bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    return int(val.numel() * val.element_size())
