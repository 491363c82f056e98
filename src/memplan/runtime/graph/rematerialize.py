"""Forward and backward of a graph, where backward recomputes values instead of saving them.

With PyTorch's own tags (`torch.utils.checkpoint`), an operator runs again at most once, and its
results are kept until their last use. A replay here is exactly what the solver evaluated: a copy of
some forward operators, right before the backward operator that first needs one of their results.
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

_UNCHECKED_SAVE = "saved_tensor_with_no_vc_check"
"""PyTorch's key in `node.meta` of saved tensors that autograd does not check for later writes.
They come last among the saved ones."""
_FORWARD_ONLY_META = ("partitioner_tag", "recompute", "ac_graph_id")
"""Keys in `node.meta` that must not be copied to a node in backward."""


@dataclass(frozen=True)
class NodeReplay:
    """Forward operators that run again in backward, by the names of their nodes."""

    before: str
    """The backward operator right before which they run; empty for the end of backward."""
    operators: tuple[str, ...]
    """The forward operators, in order."""
    makes: frozenset[str]
    """Those results of theirs that are not in memory when the replay begins."""
    gives: frozenset[str]
    """Those of `makes` that backward uses from then on in place of forward's results."""


def rematerialized(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    results: int,
    replays: Sequence[NodeReplay],
    root: torch.nn.Module,
    is_impure: Callable[[fx.Node], bool],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward with the replays.

    The first `results` outputs of forward go to the caller. The others are saved for backward and
    are its first inputs. `root` holds the constants of both graphs. `is_impure` tells whether a
    node must run although nobody uses its result.
    """
    program_of(forward)
    program_of(backward)
    written = _Backward(forward, backward, saved_by(forward, results), replays)
    received = sorted(written.write(is_impure), key=_is_number)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(forward.graph, copies)
    saves = (copies[node] for node in received)
    graph.output((*returned[:results], *saves))  # type: ignore[index,misc]
    return fx.GraphModule(root, graph), fx.GraphModule(root, written.graph)


def saved_by(forward: fx.GraphModule, results: int) -> list[fx.Node]:
    """What forward saves for backward, in the order of backward's inputs.

    Forward returns it after its results. PyTorch puts numbers, such as a symbolic size, last among
    forward's outputs and first among backward's inputs.
    """
    saved: Any = forward.graph.output_node().args[0]
    return sorted(saved[results:], key=lambda node: not _is_number(node))


def _is_number(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return is_symbolic(val) and not isinstance(val, torch.Tensor)


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


class _Backward:
    """Writes backward as a new graph that contains the replays."""

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        saved: list[fx.Node],
        replays: Sequence[NodeReplay],
    ) -> None:
        self.graph = fx.Graph()
        self._nodes = {node.name: node for node in forward.graph.nodes}
        self._old = list(backward.graph.nodes)
        self._replays: dict[str, list[NodeReplay]] = {}
        for replay in replays:
            self._replays.setdefault(replay.before, []).append(replay)
        self._recomputed = {
            facts_of(self._nodes[name]).storage for one in replays for name in one.gives
        }
        places = list(backward.graph.find_nodes(op="placeholder"))
        self._saves = dict(zip(places, saved, strict=False))
        """The old backward's inputs that forward saves, with the forward node of each."""
        others = places[len(saved) :]
        self._copies = {node: self.graph.node_copy(node) for node in others}
        """New nodes, by the node of the old backward."""
        self._first_other = self._copies[others[0]]
        """Saved inputs are inserted before it."""
        self._received: dict[fx.Node, fx.Node] = {}
        """New inputs, by the saved forward node."""
        self._values: dict[fx.Node, fx.Node] = {}
        """New nodes that hold the value of a forward node."""

    def write(self, is_impure: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """Write the graph. Returns the forward nodes to save, in the order of its inputs."""
        for source in self._saves.values():
            if facts_of(source).storage not in self._recomputed:
                self._saved(source)
        for node in self._old:
            if node.op == "call_function" and not facts_of(node).no_kernel:
                self._replay(self._replays.pop(node.name, []))
                self._copied(node)
        for late in list(self._replays):
            self._replay(self._replays.pop(late))
        output = self._old[-1]
        self._copies[output] = self.graph.node_copy(output, self._copied)
        self.graph.eliminate_dead_code(is_impure_node=is_impure)
        used = [node for node, place in self._received.items() if place.users]
        used.sort(key=lambda node: (not _is_number(node), bool(node.meta.get(_UNCHECKED_SAVE))))
        for node, place in self._received.items():
            if node not in used:
                self.graph.erase_node(place)
        for node in used:
            self._first_other.prepend(self._received[node])
        return used

    def _copied(self, node: fx.Node) -> fx.Node:
        """The new node for a node of the old backward."""
        if node in self._saves:
            return self._value(self._saves[node], {})
        if node not in self._copies:
            self._copies[node] = self.graph.node_copy(node, self._copied)
        return self._copies[node]

    def _saved(self, source: fx.Node) -> fx.Node:
        """The input that receives a forward node's value."""
        if source not in self._received:
            with self.graph.inserting_before(self._first_other):
                place = self.graph.placeholder(source.name)
            place.meta = {k: v for k, v in source.meta.items() if k not in _FORWARD_ONLY_META}
            self._received[source] = self._values[source] = place
        return self._values[source]

    def _replay(self, replays: list[NodeReplay]) -> None:
        for one in replays:
            local: dict[fx.Node, fx.Node] = {}
            for name in one.operators:
                self._copy(self._nodes[name], one.makes, local)
            for name in one.gives:
                self._values[self._nodes[name]] = local[self._nodes[name]]

    def _copy(self, node: fx.Node, makes: frozenset[str], local: dict[fx.Node, fx.Node]) -> None:
        """Copy an operator, and those elements of its result that are not in memory."""
        local[node] = self._new(node, local)
        for user in node.users:
            if is_element(user) and (user.name in makes or facts_of(user).storage is None):
                self._copy(user, makes, local)

    def _value(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        """The new node for a forward node's value. `local`: the current replay's, which go
        first."""
        if node in local or node in self._values:
            return local[node] if node in local else self._values[node]
        if node.op == "get_attr":
            self._values[node] = self._new(node, local)
        elif node.op == "placeholder" or not facts_of(node).no_kernel or is_element(node):
            return self._saved(node)
        else:
            view = self._new(node, local)
            values = local if any(one in local for one in node.all_input_nodes) else self._values
            values[node] = view
            return view
        return self._values[node]

    def _new(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        without = without_statistics(node)
        if without is None:
            new = self.graph.node_copy(node, lambda needed: self._value(needed, local))
        else:
            target, args = without
            args = fx.map_arg(args, lambda needed: self._value(needed, local))
            new = self.graph.call_function(target, args)
        new.meta = {key: value for key, value in node.meta.items() if key not in _FORWARD_ONLY_META}
        return new
