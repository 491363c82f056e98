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
    add_part,
    as_received,
    constants,
    kind,
    named,
    returned,
    tangents,
)
from memplan.runtime.graph.program import BACKWARD, MemplanOp
from memplan.runtime.graph.rematerialize import FORWARD_ONLY_META, NodeReplay, replay


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
    """Both parts of a region in one graph."""

    module: fx.GraphModule
    caller_turn: fx.Node
    """Its first argument is what forward returns: its results, then what it saves."""
    accumulate: fx.Node
    """Its argument is what backward returns."""
    saved: list[int]
    """Places of the saved values among what forward returns, in the order of backward's inputs."""
    tangents: list[fx.Node]
    results: int

    def parts(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward as graphs of their own, as PyTorch's partitioner would make them: to
        be called before operators work in place."""
        forward, backward = fx.Graph(), fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        returned_nodes: Any = self.caller_turn.args[0]
        received = [returned_nodes[place] for place in self.saved]
        *nodes, _ = self.module.graph.nodes
        at = nodes.index(self.caller_turn)
        for node in nodes[:at]:
            copies[node] = forward.node_copy(node, copies.__getitem__)
        forward.output(fx.map_arg(returned_nodes, copies.__getitem__))
        for node in (*received, *self.tangents):
            copies[node] = backward.placeholder(node.name)
            copies[node].meta = {k: v for k, v in node.meta.items() if k not in FORWARD_ONLY_META}
        for node in nodes[at:]:
            if node not in (self.caller_turn, *self.tangents, self.accumulate):
                copies[node] = backward.node_copy(node, copies.__getitem__)
        (gradients,) = self.accumulate.args
        backward.output(fx.map_arg(gradients, copies.__getitem__)).meta = self.accumulate.meta
        return fx.GraphModule(self.module, forward), fx.GraphModule(self.module, backward)

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
    forward, backward = joint.parts
    graph = fx.Graph()
    values = add_part(graph, forward)
    outputs = returned(forward)
    results = tuple(named(outputs[: joint.results], values))
    changed = [node for name, node in values.items() if name in joint.changed]
    caller_turn = graph.call_function(CallerTurn(len(changed)), (results, *changed))
    given = tangents(backward)
    caller_turn.meta = {"val": [one.meta.get("val") for one in given.values()], BACKWARD: False}
    elements = []
    for number, (name, node) in enumerate(given.items()):
        taken = graph.create_node(
            "call_function", operator.getitem, (caller_turn, number), name=name
        )
        taken.meta = {**node.meta, BACKWARD: False}
        elements.append(taken)
    inputs = [*named(as_received(outputs[joint.results :]), values), *elements]
    gradients = named(returned(backward), add_part(graph, backward, inputs, backward=True))
    copied = [
        _bytes(gradient)
        for gradient, node in zip(gradients, joint.module.graph.nodes, strict=False)
        if isinstance(gradient, fx.Node) and not _same_layout(gradient, node)
    ]
    # Autograd copies gradients whose layout differs from their input's, one at a time.
    accumulate = graph.call_function(AfterBackward(max(copied, default=0)), (tuple(gradients),))
    accumulate.meta = {**backward.graph.output_node().meta, "val": None, BACKWARD: True}
    # Until backward ends, the caller may hold the results, and does hold the gradients it gave.
    graph.output((results, tuple(elements), tuple(gradients)))
    module = fx.GraphModule(constants(forward, backward), graph)
    replay(module, replays)
    saved = sorted(_crossing(graph, caller_turn), key=kind)
    if saves:
        caller_turn.args = ((*results, *saved), *changed)
    places = [joint.results + saved.index(one) for one in as_received(saved)]
    return Region(module, caller_turn, accumulate, places, elements, joint.results)


def _crossing(graph: fx.Graph, caller_turn: fx.Node) -> list[fx.Node]:
    """What backward uses of forward."""
    *nodes, _ = graph.nodes
    at = nodes.index(caller_turn)
    later = set(nodes[at + 1 :])
    return [one for one in nodes[:at] if not later.isdisjoint(one.users)]


def _same_layout(gradient: fx.Node, given: fx.Node) -> bool:
    """Whether autograd keeps a gradient without a copy."""
    val, of = gradient.meta["val"], given.meta["val"]
    if not isinstance(val, torch.Tensor):
        return True  # a mesh, say
    return isinstance(of, torch.Tensor) and val.stride() == of.stride() and val.dtype == of.dtype


def _bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    return int(val.numel() * val.element_size())
