"""Writes replays into a graph of forward and backward: what backward recomputes.

With PyTorch's own tags (`torch.utils.checkpoint`), an operator runs again at most once, and its
results are kept until their last use. A replay here is exactly what the solver evaluated: a copy of
some forward operators, right before the backward operator that first needs one of their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.runtime.graph.program import BACKWARD, facts_of, is_element, program_of
from memplan.runtime.tape.replayable import traits_of

FORWARD_ONLY_META = ("partitioner_tag", "recompute", "ac_graph_id")
"""Keys in `node.meta` that must not be copied to a node in backward."""


@dataclass(frozen=True)
class NodeReplay:
    """Forward operators that run again in backward, by the names of their nodes."""

    before: str
    """The operator right before which they run."""
    operators: tuple[str, ...]
    """The forward operators, in order."""
    makes: frozenset[str]
    """Those results of theirs that are not in memory when the replay begins."""
    gives: frozenset[str]
    """Those of `makes` that backward uses from then on in place of forward's results."""


def replay(module: fx.GraphModule, replays: Sequence[NodeReplay]) -> None:
    """Write the replays into a graph in which forward is followed by backward (`BACKWARD`)."""
    if replays:
        program_of(module)
        _Writer(module.graph).write(replays)


def without_statistics(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Operator and arguments that compute a training batch norm again without updating its running
    statistics a second time. None for other operators."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    places = traits_of(target).statistics
    if places is None or node.kwargs or len(node.args) <= max(places) or not node.args[places[2]]:
        return None
    if target is torch.ops.aten._native_batch_norm_legit_functional.default:
        kept = tuple(arg for place, arg in enumerate(node.args) if place not in places[:2])
        return torch.ops.aten._native_batch_norm_legit.no_stats, kept
    if any(str(target._schema.arguments[place].type) != "Optional[Tensor]" for place in places[:2]):
        return None
    return target, tuple(
        None if place in places[:2] else arg for place, arg in enumerate(node.args)
    )


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in graph.nodes}
        self._now: dict[fx.Node, fx.Node] = {}
        """What takes the place of a forward value, or of a view of one, from here on."""

    def write(self, replays: Sequence[NodeReplay]) -> None:
        before: dict[str, list[NodeReplay]] = {}
        for one in replays:
            before.setdefault(one.before, []).append(one)
        later = [one for one in self._graph.nodes if one.op == "output" or one.meta.get(BACKWARD)]
        for node in later:
            if node.op == "output" or not facts_of(node).no_kernel:
                with self._graph.inserting_before(node):
                    for one in before.get(node.name, ()):
                        self._replay(one)
                    given = fx.map_arg((node.args, node.kwargs), lambda of: self._value(of, {}))
                    node.args, node.kwargs = given
        for node in reversed(later):  # views of forward's values, which would keep them
            if node.op == "call_function" and facts_of(node).no_kernel and not node.users:
                self._graph.erase_node(node)

    def _replay(self, one: NodeReplay) -> None:
        local: dict[fx.Node, fx.Node] = {}
        for name in one.operators:
            self._copy(self._nodes[name], one.makes, local)
        for name in one.gives:
            self._now[self._nodes[name]] = local[self._nodes[name]]

    def _copy(self, node: fx.Node, makes: frozenset[str], local: dict[fx.Node, fx.Node]) -> None:
        """Copy an operator, and those elements of its result that are not in memory."""
        local[node] = self._new(node, local)
        for user in list(node.users):
            if is_element(user) and (user.name in makes or facts_of(user).storage is None):
                self._copy(user, makes, local)

    def _value(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        """The node that has a value now. `local`: the current replay's, which go first."""
        if node in local or node in self._now:
            return local[node] if node in local else self._now[node]
        if node.op == "get_attr" and not node.meta.get(BACKWARD):
            self._now[node] = self._new(node, local)
            return self._now[node]
        if node.op != "call_function" or not facts_of(node).no_kernel or is_element(node):
            return node
        needed = node.all_input_nodes
        if [self._value(one, local) for one in needed] == needed:
            return node
        view = self._new(node, local)
        values = local if any(one in local for one in needed) else self._now
        values[node] = view
        return view

    def _new(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        without = without_statistics(node)
        if without is None:
            new = self._graph.node_copy(node, lambda needed: self._value(needed, local))
        else:
            target, args = without
            args = fx.map_arg(args, lambda needed: self._value(needed, local))
            new = self._graph.call_function(target, args)
        new.meta = {key: value for key, value in node.meta.items() if key not in FORWARD_ONLY_META}
        new.meta[BACKWARD] = True
        return new
