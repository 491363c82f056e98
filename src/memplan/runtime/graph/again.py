"""Forward and backward of a graph, with values that backward makes again instead of taking them.

PyTorch's own tags (`torch.utils.checkpoint`) have an operator run again at most once and keep
what it makes until the last use. Here a replay is what the solver evaluated: a copy of forward's
operators right before the operator of backward that needs the first of what they make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.runtime.graph.program import facts_of, is_element, program_of
from memplan.runtime.graph.workspaces import is_symbolic
from memplan.runtime.tape.replayable import traits_of

_NOT_CHECKED = "saved_tensor_with_no_vc_check"
"""Key in `node.meta`, of PyTorch: such saved tensors come last."""
_OF_FORWARD = ("partitioner_tag", "recompute", "ac_graph_id")
"""Keys in `node.meta` that a copy in backward does not have."""


@dataclass(frozen=True)
class Again:
    """A replay, in names of nodes."""

    before: str
    """The operator of backward right before which it runs; empty for the end."""
    operators: tuple[str, ...]
    """Of forward."""
    makes: frozenset[str]
    """Operators, or elements of their results, that are not there when it begins."""
    gives: frozenset[str]
    """Of these, what is used in place of what forward made from then on."""


def made_again(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    results: int,
    replays: Sequence[Again],
    root: torch.nn.Module,
    is_impure: Callable[[fx.Node], bool],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Both parts with the replays. The first `results` outputs of forward are the caller's, the
    others what it saves for backward, whose first inputs they are. `root` has the constants of
    both; `is_impure`: whether a node is to run though nobody uses its result."""
    program_of(forward)
    program_of(backward)
    made = _Backward(forward, backward, saved_by(forward, results), replays)
    received = sorted(made.whole(is_impure), key=_is_number)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(forward.graph, copies)
    saves = (copies[node] for node in received)
    graph.output((*returned[:results], *saves))  # type: ignore[index,misc]
    return fx.GraphModule(root, graph), fx.GraphModule(root, made.graph)


def saved_by(forward: fx.GraphModule, results: int) -> list[fx.Node]:
    """What forward returns for backward behind its results, in the order of backward's inputs. To
    PyTorch numbers, such as a count of rows, are the last of the outputs and the first inputs."""
    saved: Any = forward.graph.output_node().args[0]
    return sorted(saved[results:], key=lambda node: not _is_number(node))


def _is_number(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return is_symbolic(val) and not isinstance(val, torch.Tensor)


def without_statistics(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Target and arguments of a batch norm in training that leave its running statistics alone:
    what it makes does not depend on them. None for other operators."""
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


class _Backward:
    """Backward, written anew."""

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        saved: list[fx.Node],
        replays: Sequence[Again],
    ) -> None:
        self.graph = fx.Graph()
        self._nodes = {node.name: node for node in forward.graph.nodes}
        self._old = list(backward.graph.nodes)
        self._replays: dict[str, list[Again]] = {}
        for replay in replays:
            self._replays.setdefault(replay.before, []).append(replay)
        self._again = {facts_of(self._nodes[name]).shows for one in replays for name in one.gives}
        places = list(backward.graph.find_nodes(op="placeholder"))
        self._saves = dict(zip(places, saved, strict=False))
        """Inputs of backward that forward saves, and what it saves."""
        others = places[len(saved) :]
        self._here = {node: self.graph.node_copy(node) for node in others}
        self._first_other = self._here[others[0]]
        """What is saved goes before it."""
        self._received: dict[fx.Node, fx.Node] = {}
        """Of forward's nodes that are saved: the new inputs."""
        self._of: dict[fx.Node, fx.Node] = {}
        """What stands for a node of forward."""

    def whole(self, is_impure: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """What forward has to save, in the order of the new graph's inputs."""
        for source in self._saves.values():
            if facts_of(source).shows not in self._again:
                self._saved(source)
        for node in self._old:
            if node.op == "call_function" and not facts_of(node).free:
                self._replay(self._replays.pop(node.name, []))
                self._mine(node)
        for late in list(self._replays):
            self._replay(self._replays.pop(late))
        output = self._old[-1]
        self._here[output] = self.graph.node_copy(output, self._mine)
        self.graph.eliminate_dead_code(is_impure_node=is_impure)
        used = [node for node, place in self._received.items() if place.users]
        used.sort(key=lambda node: (not _is_number(node), bool(node.meta.get(_NOT_CHECKED))))
        for node, place in self._received.items():
            if node not in used:
                self.graph.erase_node(place)
        for node in used:
            self._first_other.prepend(self._received[node])
        return used

    def _mine(self, node: fx.Node) -> fx.Node:
        """What stands for a node of the old backward."""
        if node in self._saves:
            return self._value(self._saves[node], {})
        if node not in self._here:
            self._here[node] = self.graph.node_copy(node, self._mine)
        return self._here[node]

    def _saved(self, source: fx.Node) -> fx.Node:
        """A node of forward as an input."""
        if source not in self._received:
            with self.graph.inserting_before(self._first_other):
                place = self.graph.placeholder(source.name)
            place.meta = {k: v for k, v in source.meta.items() if k not in _OF_FORWARD}
            self._received[source] = self._of[source] = place
        return self._of[source]

    def _replay(self, replays: list[Again]) -> None:
        for one in replays:
            local: dict[fx.Node, fx.Node] = {}
            for name in one.operators:
                self._copy(self._nodes[name], one.makes, local)
            for name in one.gives:
                self._of[self._nodes[name]] = local[self._nodes[name]]

    def _copy(self, node: fx.Node, makes: frozenset[str], local: dict[fx.Node, fx.Node]) -> None:
        """An operator, and those elements of its result that are not there."""
        local[node] = self._new(node, local)
        for user in node.users:
            if is_element(user) and (user.name in makes or facts_of(user).shows is None):
                self._copy(user, makes, local)

    def _value(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        """What stands for a node of forward; in a replay, for what it made itself."""
        if node in local or node in self._of:
            return local[node] if node in local else self._of[node]
        if node.op == "get_attr":
            self._of[node] = self._new(node, local)
        elif node.op == "placeholder" or not facts_of(node).free or is_element(node):
            return self._saved(node)
        else:
            view = self._new(node, local)
            known = local if any(one in local for one in node.all_input_nodes) else self._of
            known[node] = view
            return view
        return self._of[node]

    def _new(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        without = without_statistics(node)
        if without is None:
            new = self.graph.node_copy(node, lambda needed: self._value(needed, local))
        else:
            target, args = without
            args = fx.map_arg(args, lambda needed: self._value(needed, local))
            new = self.graph.call_function(target, args)
        new.meta = {key: value for key, value in node.meta.items() if key not in _OF_FORWARD}
        return new
