"""A compiled region: forward, then whatever the caller does, then backward, as one graph.

In one graph the order of both parts is judged by its true peak: what forward saves is held until
the operator of backward that uses it last.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.runtime.graph.execute import Executable
from memplan.runtime.graph.joint import (
    AfterBackward,
    Joint,
    add_backward,
    add_forward,
    constants,
    is_tangent,
    returned,
)
from memplan.runtime.graph.program import BACKWARD, MemplanOp
from memplan.runtime.graph.rematerialize import NodeReplay, saved_by
from memplan.types.errors import InternalError


class CallerTurn(MemplanOp):
    """What the caller does between forward and backward: it receives forward's results, copies new
    values into the inputs that forward changes, and calls backward with gradients.

    Arguments: what forward returns, then those inputs. Result: the gradients.
    """

    __name__ = "caller_turn"
    barrier = True

    def __init__(self, changed: int) -> None:
        self.writes = tuple(range(1, 1 + changed))


@dataclass(frozen=True, eq=False)
class Region:
    """Both parts of a region, in one graph (`module`) and as PyTorch's partitioner made them."""

    module: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    caller_turn: fx.Node
    """Its first argument is what forward returns."""
    accumulate: fx.Node
    """Its argument is what backward returns."""
    saved: list[int]
    """Places of the saved values among what forward returns, in the order of backward's inputs."""
    tangents: list[fx.Node]
    results: int

    def executables(self, order: Sequence[fx.Node]) -> tuple[Executable, Executable]:
        """Code for forward and backward. `order`: see `Ordering.nodes`."""
        at = order.index(self.caller_turn)
        inputs = list(self.module.graph.find_nodes(op="placeholder"))
        after = [
            node
            for node in order[at + 1 :]
            if node is not self.accumulate and node not in self.tangents
        ]
        returned_nodes: Any = self.caller_turn.args[0]
        received = [returned_nodes[place] for place in self.saved]
        return (
            Executable(order[:at], inputs, self.caller_turn),
            Executable(after, [*received, *self.tangents], self.accumulate),
        )


def region(joint: Joint, replays: Sequence[NodeReplay] = (), *, saves: bool = True) -> Region:
    """Put forward and backward into one graph; backward recomputes what the replays say. With
    `saves=False`, saved values are not held during the caller's turn: for a solver that is to
    choose them."""
    forward, backward = joint.parts(replays)
    graph = fx.Graph()
    returned_nodes = add_forward(graph, forward)
    places = list(backward.graph.find_nodes(op="placeholder"))
    given = [node for node in places if is_tangent(node)]
    outputs = list(returned(forward))
    saved = [outputs.index(node) for node in saved_by(forward, joint.results)]
    if places[len(saved) :] != given:
        raise InternalError("backward's inputs are not what forward saves, then gradients")
    inputs = graph.find_nodes(op="placeholder")
    changed = [node for node in inputs if node.name in joint.changed]
    held = tuple(returned_nodes) if saves else tuple(returned_nodes[: joint.results])
    caller_turn = graph.call_function(CallerTurn(len(changed)), (held, *changed))
    caller_turn.meta = {"val": [node.meta.get("val") for node in given], BACKWARD: False}
    tangents = []
    for number, node in enumerate(given):
        element = graph.call_function(operator.getitem, (caller_turn, number))
        element.meta = {"val": node.meta.get("val"), BACKWARD: False}
        tangents.append(element)
    gradients = add_backward(
        graph, backward, [*(returned_nodes[place] for place in saved), *tangents]
    )
    copied = [
        _bytes(gradient)
        for gradient, node in zip(gradients, joint.module.graph.nodes, strict=False)
        if isinstance(gradient, fx.Node) and not _same_layout(gradient, node)
    ]
    # Autograd copies gradients whose layout differs from their input's, one at a time.
    accumulate = graph.call_function(AfterBackward(max(copied, default=0)), (tuple(gradients),))
    accumulate.meta = {"val": None, BACKWARD: True}
    # Until backward ends, the caller may hold the results, and does hold the gradients it gave.
    graph.output((tuple(returned_nodes[: joint.results]), tuple(tangents), tuple(gradients)))
    module = fx.GraphModule(constants(forward, backward), graph)
    return Region(
        module, forward, backward, caller_turn, accumulate, saved, tangents, joint.results
    )


def _same_layout(gradient: fx.Node, given: fx.Node) -> bool:
    """Whether autograd keeps a gradient without a copy."""
    val, of = gradient.meta["val"], given.meta["val"]
    if not isinstance(val, torch.Tensor):
        return True  # a mesh, say
    return isinstance(of, torch.Tensor) and val.stride() == of.stride() and val.dtype == of.dtype


def _bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    return int(val.numel() * val.element_size())
