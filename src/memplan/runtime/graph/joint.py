"""A whole training step as one graph: forward, backward, and each parameter's update.

AOTAutograd hands its partitioner the joint graph. PyTorch's own partitioner divides it, so that
`torch.utils.checkpoint`, random numbers and batch norm are as PyTorch has them; both parts are then
put into one graph again, in which a gradient is taken as soon as it is there.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memplan.runtime.graph.again import Again, made_again, saved_by
from memplan.runtime.graph.arithmetic import (
    DEVICE,
    GRADIENT,
    PARAMETER,
    Arithmetic,
    Named,
    Token,
)
from memplan.runtime.graph.program import (
    BACKWARD,
    NAME,
    OF_PARAMETER,
    UPDATE,
    Added,
    facts_of,
    program_of,
)
from memplan.runtime.graph.update_nodes import Number, State, TakeGradient
from memplan.runtime.graph.updates import Updates
from memplan.types.errors import UsageError


class UncapturedError(Exception):
    """PyTorch's capture of a step is not the step."""


@dataclass(frozen=True, eq=False)
class Joint:
    """What AOTAutograd traced. Inputs of the graph are the primals, then the tangents; its outputs
    those of forward (`results` many), then a gradient for each primal, None where there is none."""

    module: fx.GraphModule
    inputs: Any
    results: int
    options: dict[str, Any]
    """More that the partitioner is given."""

    @cached_property
    def changed(self) -> set[str]:
        """Names of primals that forward changes: their new values are among its results, and are
        put there when it has returned."""
        return {node.name for node in changed_inputs(self.module)}

    def parts(self, replays: Sequence[Again] = ()) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward; the latter makes again what the replays say."""
        forward, backward = self._parts
        if not replays:
            return forward, backward
        root = constants(forward, backward)
        return made_again(forward, backward, self.results, replays, root, _has_effects)

    @cached_property
    def _parts(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """As PyTorch divides the graph."""
        module = copied(self.module)
        _take_elements(module.graph)
        # Else a generator on a GPU is an input of both parts.
        with functorch_config.patch(graphsafe_rng_functionalization=False):
            forward, backward = default_partition(
                module, self.inputs, num_fwd_outputs=self.results, **self.options
            )
        drawn = {node.name for node in forward.graph.nodes if is_random(node)}
        # The partitioner copies those along.
        backward.graph.eliminate_dead_code(
            is_impure_node=lambda node: (
                _has_effects(node) or (is_random(node) and node.name not in drawn)
            )
        )
        return forward, backward


def changed_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Inputs of a joint graph that who calls it changes when it has returned."""
    output = joint.graph.output_node()
    told = [getattr(one, "mutated_input", None) for one in output.meta["desc"]]
    return [node for node in joint.graph.find_nodes(op="placeholder") if node.meta["desc"] in told]


class LossGradient(Added):
    """The gradient of the loss: 1, or a gradient scaler's scale."""

    __name__ = "loss_gradient"

    def __init__(self, like: torch.Tensor, scaler: torch.amp.GradScaler | None) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._scaler = scaler

    def __call__(self) -> torch.Tensor:
        one = torch.ones(self._shape, dtype=self._dtype, device=self._device)
        return one if self._scaler is None else self._scaler.scale(one).to(self._dtype)


class UpdateBehind(Added):
    """The optimizers' step behind the graph, for its memory. Called with all gradients."""

    __name__ = "update_behind"
    barrier = True

    def __init__(self, scratch_bytes: int) -> None:
        self.scratch_bytes = scratch_bytes

    def __call__(self, *_gradients: torch.Tensor) -> None:
        pass


class Bernoulli(Added):
    """`Tensor.bernoulli_` of a tensor that does not lie in rows, as in a dropout of a transposed
    one. Functionalization makes an operator of it that draws for a result in rows: the same
    numbers, in other places."""

    __name__ = "bernoulli"
    chain = "random numbers"

    def __call__(self, like: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.empty_like(like).bernoulli_(*args).contiguous()

    @staticmethod
    def needed(node: fx.Node) -> bool:
        if node.target is not torch.ops.aten.bernoulli.p or node.kwargs:
            return False
        like = node.args[0]
        return isinstance(like, fx.Node) and not like.meta["val"].is_contiguous()


def whole_step(
    joint: Joint,
    replays: Sequence[Again],
    updates: Updates,
    scaler: torch.amp.GradScaler | None,
    primals: Sequence[Any],
    *,
    keep: bool,
    behind: bool,
) -> fx.GraphModule:
    """Forward and backward in one graph, whose inputs are the primals and whose outputs those of
    forward; each gradient is taken by a `TakeGradient`. `keep`: gradients are outputs too, because
    they stay. `behind`: the optimizers' steps come after it.

    Raises UncapturedError and UsageError where the graph has another gradient to start with than
    that of one number.
    """
    forward, backward = joint.parts(replays)
    graph = fx.Graph()
    outputs = add_forward(graph, forward)
    like = loss_gradient(joint.module)
    start = graph.call_function(LossGradient(like, scaler), ())
    start.meta = {"val": like, BACKWARD: True}
    place = dict(zip(returned(forward), outputs, strict=True))
    saved = [place[node] for node in saved_by(forward, joint.results)]
    gradients = add_backward(graph, backward, [*saved, start])
    with _disable_current_modes():
        root = constants(forward, backward)
        program_of(fx.GraphModule(root, graph))
        _take(graph, gradients, updates, primals, keep=keep, behind=behind)
    kept = [one for one in gradients if isinstance(one, fx.Node)] if keep else []
    if behind:
        update = graph.call_function(UpdateBehind(updates.behind_bytes()), tuple(kept))
        update.meta = {"val": None, BACKWARD: True, UPDATE: True}
    graph.output((*outputs[: joint.results], *kept))
    module = fx.GraphModule(root, graph)
    graph.lint()
    return module


def forward_alone(
    forward: fx.GraphModule, backward: fx.GraphModule, results: int, gradients: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What AOTAutograd is told that the parts are: a forward that saves nothing, and a backward
    that is never run."""
    forward.graph.output_node().args = (tuple(returned(forward)[:results]),)
    forward.graph.eliminate_dead_code()
    forward.recompile()
    graph = fx.Graph()
    for node in backward.graph.nodes:
        if node.op == "placeholder" and is_tangent(node):
            graph.node_copy(node)
        elif node.op == "output":
            graph.output((None,) * gradients)
    return forward, fx.GraphModule(torch.nn.Module(), graph)


def _take_elements(graph: fx.Graph) -> None:
    """Random numbers that nobody wants: the partitioner asks of each result of several tensors that
    some be taken."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if is_random(node) and not node.users and isinstance(val, (list, tuple)):
            with graph.inserting_after(node):
                taken = graph.call_function(operator.getitem, (node, 0))
            taken.meta = {**node.meta, "val": val[0]}


def is_random(node: fx.Node) -> bool:
    """Whether it gives others each time."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _has_effects(node: fx.Node) -> bool:
    """Whether a node of a backward pass is to run though nobody uses its result."""
    if node.op != "call_function":
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or target.namespace not in ("aten", "prims")
    return target is not operator.getitem and not isinstance(target, torch._ops.HigherOrderOperator)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of the same names; what nodes show is shared."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copied)
    copied[module.graph.output_node()] = graph.output(output)
    for old, new in copied.items():
        new.meta = copy.copy(old.meta)
    return fx.GraphModule(module, graph)


def add_forward(graph: fx.Graph, part: fx.GraphModule) -> list[Any]:
    """Puts forward behind what is there. Its outputs: the joint graph's, then what backward takes
    of it, in backward's order."""
    return _add(graph, part, {}, backward=False)


def add_backward(graph: fx.Graph, part: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Puts backward behind what is there, with these nodes for its placeholders; its outputs."""
    places = [node.name for node in part.graph.find_nodes(op="placeholder")]
    return _add(graph, part, dict(zip(places, inputs, strict=True)), backward=True)


def _add(
    graph: fx.Graph, part: fx.GraphModule, here: dict[str, Any], *, backward: bool
) -> list[Any]:
    """`here`: what stands for placeholders of these names."""
    for node in part.graph.nodes:
        if node.op == "output":
            return [here[one.name] if isinstance(one, fx.Node) else one for one in node.args[0]]
        if node.name in here:
            continue
        new = graph.node_copy(node, lambda needed: here[needed.name])
        if Bernoulli.needed(node):
            new.target = Bernoulli()
        new.meta = {**node.meta, BACKWARD: backward, NAME: node.name}
        here[node.name] = new
    raise AssertionError("a graph without an output")


def returned(module: fx.GraphModule) -> Any:
    return module.graph.output_node().args[0]


def is_tangent(node: fx.Node) -> bool:
    return "tangents" in str(node.target)


def loss_gradient(joint: fx.GraphModule) -> torch.Tensor:
    """What the gradient of the loss is like."""
    tangents = list(filter(is_tangent, joint.graph.find_nodes(op="placeholder")))
    if len(tangents) != 1:
        # Returned, kept in some object, or a parameter that the function writes.
        raise UncapturedError("several tensors that require a gradient are there afterwards")
    like: torch.Tensor = tangents[0].meta["val"]
    check_loss(like)
    return like


def check_loss(loss: torch.Tensor) -> None:
    """Raises UsageError where it cannot be differentiated as it is."""
    if loss.numel() != 1:
        raise UsageError(
            f"the function returns a tensor of shape {tuple(loss.shape)}, which is no loss",
            "return one number: loss.mean()",
        )
    if loss.is_complex():
        raise UsageError("the function returns a complex number, no loss", "loss.abs()")


def _take(
    graph: fx.Graph,
    gradients: Sequence[Any],
    updates: Updates,
    primals: Sequence[Any],
    *,
    keep: bool,
    behind: bool,
) -> None:
    places = list(graph.find_nodes(op="placeholder"))
    shown = [facts_of(one).shows if isinstance(one, fx.Node) else None for one in gradients]
    lasting = {facts_of(node).shows for node in places}
    for place, gradient in enumerate(gradients):
        if not isinstance(gradient, fx.Node):
            continue
        made = (
            None
            if keep or updates.whole or not updates.in_graph
            else updates.arithmetic(primals[place])
        )
        if made is not None:
            _update(graph, places[place], gradient, updates, primals[place], *made)
            continue
        shared = shown.count(shown[place]) > 1 or shown[place] in lasting
        copies = shared or not lies_as(gradient, primals[place])
        take = TakeGradient(updates, copies)
        if not behind:
            _, take.scratch_bytes = updates.state_bytes(primals[place])
            take.can_wait = not copies and updates.several_at_once(primals[place])
        node = graph.call_function(take, (places[place], gradient))
        node.meta = {"val": None, BACKWARD: True, UPDATE: True}


def _update(
    graph: fx.Graph,
    place: fx.Node,
    gradient: fx.Node,
    updates: Updates,
    parameter: torch.Tensor,
    arithmetic: Arithmetic,
    read: Callable[[int], float],
) -> None:
    """Puts the operators of a parameter's update behind what is there."""
    nodes: dict[Token, fx.Node] = {PARAMETER: place, GRADIENT: gradient}

    def brought(target: Added, val: Any) -> fx.Node:
        node = graph.call_function(target, ())
        node.meta = {"val": val, BACKWARD: True, UPDATE: True}
        return node

    for key, val in zip(arithmetic.state, arithmetic.begins_with, strict=True):
        nodes["state", key] = brought(State(updates, parameter, key), val)

    def argument(leaf: Any) -> Any:
        if not isinstance(leaf, Named):
            return leaf
        if leaf.token == DEVICE:
            return parameter.device
        if leaf.token[0] == "number":
            return brought(Number(read, leaf.token[1]), None)  # type: ignore[arg-type]
        return nodes[leaf.token]

    for number, operation in enumerate(arithmetic.operations):
        leaves = [argument(leaf) for leaf in operation.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, operation.spec)
        node = graph.call_function(operation.func, args, kwargs)
        node.meta = {"val": arithmetic.results[number], BACKWARD: True, UPDATE: True}
        node.meta[OF_PARAMETER] = id(parameter)
        nodes["made", number, 0] = node


def lies_as(gradient: fx.Node, parameter: torch.Tensor) -> bool:
    """Whether a gradient is all of its storage and lies as AccumulateGrad wants it."""
    val = gradient.meta["val"]
    whole = val.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    return bool(whole and val.stride() == parameter.stride() and val.dtype == parameter.dtype)


def constants(*modules: fx.GraphModule) -> torch.nn.Module:
    """Constants of the graphs."""
    root = torch.nn.Module()
    for module in modules:
        for name, value in {**vars(module)["_buffers"], **vars(module)["_modules"]}.items():
            setattr(root, name, value)
        for node in module.graph.nodes:
            if node.op == "get_attr" and not hasattr(root, str(node.target)):
                setattr(root, str(node.target), getattr(module, str(node.target)))
    return root
