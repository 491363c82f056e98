"""A whole training step as one graph: forward, backward, and each parameter's update.

AOTAutograd gives its partitioner the joint graph. PyTorch's own partitioner splits it into forward
and backward, so that `torch.utils.checkpoint`, random numbers and batch norm behave as in PyTorch.
Then both parts become one graph again, in which each gradient is used as soon as it is computed.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition
from torch.utils._python_dispatch import _disable_current_modes

from memplan.runtime.graph.program import (
    BACKWARD,
    UPDATE,
    MemplanOp,
    facts_of,
    program_of,
)
from memplan.runtime.graph.rematerialize import NodeReplay, replay
from memplan.runtime.graph.setup import Setup
from memplan.runtime.graph.update_nodes import TakeGradient
from memplan.runtime.graph.workspaces import is_symbolic
from memplan.types.allocation import ROUNDING
from memplan.types.errors import UsageError


class UncapturedError(Exception):
    """PyTorch captures something else than what the step does."""


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint graph as AOTAutograd traces it.

    Its inputs are the primals (inputs of forward), then the tangents (gradients of forward's
    results). Its outputs are those of forward, then a gradient for each primal or None.
    """

    module: fx.GraphModule
    inputs: Any
    results: int
    """Number of forward's outputs."""
    options: dict[str, Any]
    """Further arguments of the partitioner."""

    @cached_property
    def changed(self) -> set[str]:
        """Names of primals that forward changes. The graph returns their new values, which the
        caller then copies into them."""
        return {node.name for node in changed_inputs(self.module)}

    @cached_property
    def trained(self) -> list[int]:
        """Places of primals that have a gradient."""
        gradients = returned(self.module)[self.results :]
        return [place for place, one in enumerate(gradients) if isinstance(one, fx.Node)]

    @cached_property
    def parts(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward as PyTorch's partitioner splits the graph."""
        module = copied(self.module)
        _take_elements(module.graph)
        # Otherwise a GPU's generator would become an input of both parts.
        with functorch_config.patch(graphsafe_rng_functionalization=False):
            forward, backward = default_partition(
                module, self.inputs, num_fwd_outputs=self.results, **self.options
            )
        drawn = {node.name for node in forward.graph.nodes if is_random(node)}
        # The partitioner copies forward's random operators into backward, too.
        backward.graph.eliminate_dead_code(
            is_impure_node=lambda node: (
                _has_effects(node) or (is_random(node) and node.name not in drawn)
            )
        )
        return forward, backward


def changed_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Inputs of a joint graph that its caller changes after it has returned."""
    output = joint.graph.output_node()
    told = [getattr(one, "mutated_input", None) for one in output.meta["desc"]]
    return [node for node in joint.graph.find_nodes(op="placeholder") if node.meta["desc"] in told]


class LossGradient(MemplanOp):
    """Makes the gradient of the loss: 1, or a gradient scaler's scale."""

    __name__ = "loss_gradient"

    def __init__(self, like: torch.Tensor, scaler: torch.amp.GradScaler | None) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._scaler = scaler
        numbers = 2 * ROUNDING if like.is_cuda else like.element_size() + 4
        self.scratch_bytes = 0 if scaler is None else numbers

    def __call__(self) -> torch.Tensor:
        one = torch.ones(self._shape, dtype=self._dtype, device=self._device)
        return one if self._scaler is None else self._scaler.scale(one).to(self._dtype)


class AfterBackward(MemplanOp):
    """Stands for what comes after the graph: the optimizers' step, or copies of gradients. Does
    nothing, but its memory counts for the peak. Called with all gradients."""

    __name__ = "after_backward"
    barrier = True

    def __init__(self, scratch_bytes: int) -> None:
        self.scratch_bytes = scratch_bytes

    def __call__(self, *_gradients: Any) -> None:
        pass


class Bernoulli(MemplanOp):
    """`Tensor.bernoulli_` of a tensor that is not contiguous, as in dropout of a transposed one.

    Functionalization replaces it by an operator with a contiguous result, which would have the same
    random numbers in other places.
    """

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
    joint: Joint, replays: Sequence[NodeReplay], setup: Setup, primals: Sequence[Any]
) -> fx.GraphModule:
    """Forward, backward with the replays, and updates in one graph, with the primals as inputs and
    forward's outputs.

    Each gradient is used by a `TakeGradient`. Gradients that stay in `.grad` are outputs, too.

    Raises UncapturedError and UsageError where backward does not start with the gradient of one
    number.
    """
    forward, backward = joint.parts
    graph = fx.Graph()
    values = add_part(graph, forward)
    like = loss_gradient(joint.module)
    start = graph.call_function(LossGradient(like, setup.scaler), ())
    start.meta = {"val": like, BACKWARD: True}
    outputs = returned(forward)
    results = named(outputs[: joint.results], values)
    saved = named(as_received(outputs[joint.results :]), values)
    gradients = named(returned(backward), add_part(graph, backward, [*saved, start], backward=True))
    keep = setup.keeps_gradients()
    with _disable_current_modes():
        root = constants(forward, backward)
        program_of(fx.GraphModule(root, graph))
        _append_updates(graph, gradients, results, setup, primals)
    kept = [one for one in gradients if isinstance(one, fx.Node)] if keep else []
    if not setup.updates_in_graph():
        update = graph.call_function(AfterBackward(setup.scratch_after_bytes()), tuple(kept))
        update.meta = {"val": None, BACKWARD: True, UPDATE: True}
    graph.output((*results, *kept))
    module = fx.GraphModule(root, graph)
    replay(module, replays)
    graph.lint()
    return module


def forward_alone(
    forward: fx.GraphModule, backward: fx.GraphModule, results: int, gradients: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two parts that AOTAutograd is given in place of the real ones: a forward that saves
    nothing, and a backward that never runs."""
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


def run_once(*_args: Any) -> Any:
    """The code of the backward part that never runs."""
    raise RuntimeError("the step has run its backward pass already")


def _take_elements(graph: fx.Graph) -> None:
    """Take an element of each unused random result of several tensors: the partitioner fails where
    no element of such a result is taken."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if is_random(node) and not node.users and isinstance(val, (list, tuple)):
            with graph.inserting_after(node):
                taken = graph.call_function(operator.getitem, (node, 0))
            taken.meta = {**node.meta, "val": val[0]}


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _has_effects(node: fx.Node) -> bool:
    """Whether a node of backward must run although nobody uses its result."""
    if node.op != "call_function":
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or target.namespace not in ("aten", "prims")
    return target is not operator.getitem and not isinstance(target, torch._ops.HigherOrderOperator)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, with the same names of nodes and the same values in `node.meta`."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copied)
    copied[module.graph.output_node()] = graph.output(output)
    for old, new in copied.items():
        new.meta = copy.copy(old.meta)
    return fx.GraphModule(module, graph)


def add_part(
    graph: fx.Graph,
    part: fx.GraphModule,
    inputs: Sequence[fx.Node] | None = None,
    *,
    backward: bool = False,
) -> dict[str, fx.Node]:
    """Append forward, or backward with nodes in place of its inputs, to a graph. Returns the new
    nodes by the names of the part's."""
    places = [] if inputs is None else part.graph.find_nodes(op="placeholder")
    copies = {place.name: one for place, one in zip(places, inputs or (), strict=True)}
    for node in part.graph.nodes:
        if node.op != "output" and node.name not in copies:
            new = graph.node_copy(node, lambda needed: copies[needed.name])
            if Bernoulli.needed(node):
                new.target = Bernoulli()
            new.meta = {**node.meta, BACKWARD: backward}
            copies[node.name] = new
    return copies


def named(nodes: Sequence[Any], values: dict[str, fx.Node]) -> list[Any]:
    """The new nodes for a part's; what is no node stays."""
    return [values[one.name] if isinstance(one, fx.Node) else one for one in nodes]


def returned(module: fx.GraphModule) -> Any:
    return module.graph.output_node().args[0]


def is_tangent(node: fx.Node) -> bool:
    return "tangents" in str(node.target)


def as_received(saved: Iterable[fx.Node]) -> list[fx.Node]:
    """Values that forward saves, in the order of backward's inputs: first numbers, such as a
    symbolic size, which forward returns last."""
    return sorted(saved, key=lambda one: kind(one) < _NUMBER)


def kind(node: fx.Node) -> int:
    """AOTAutograd wants forward to return saved values in the order of their kinds."""
    val = node.meta.get("val")
    if val is None or isinstance(val, torch.Tensor):  # it is not noted of a generator's state
        return int(bool(node.meta.get(_UNCHECKED_SAVE)))
    return _NUMBER if is_symbolic(val) else 2  # such as a mesh of devices


_NUMBER = 3
_UNCHECKED_SAVE = "saved_tensor_with_no_vc_check"
"""PyTorch's key in `node.meta` of saved tensors that autograd does not check for later writes."""


def tangents(module: fx.GraphModule) -> dict[str, fx.Node]:
    """The inputs that are gradients of forward's results, by their names."""
    places = module.graph.find_nodes(op="placeholder")
    return {node.name: node for node in places if is_tangent(node)}


def loss_gradient(joint: fx.GraphModule) -> torch.Tensor:
    """A fake tensor like the gradient of the loss."""
    given = list(tangents(joint).values())
    if len(given) != 1:
        raise UncapturedError(
            "the loss leaves other tensors that require a gradient: it returns them, keeps them in "
            "an object, or writes into a parameter"
        )
    like: torch.Tensor = given[0].meta["val"]
    check_loss(like)
    return like


def check_loss(loss: torch.Tensor) -> None:
    """Raises UsageError for a loss that cannot be differentiated as it is."""
    if loss.numel() != 1:
        raise UsageError(
            f"the function returns a tensor of shape {tuple(loss.shape)}, which is no loss",
            "return one number: loss.mean()",
        )
    if loss.is_complex():
        raise UsageError("the function returns a complex number, no loss", "loss.abs()")


def _append_updates(
    graph: fx.Graph,
    gradients: Sequence[Any],
    results: Sequence[Any],
    setup: Setup,
    primals: Sequence[Any],
) -> None:
    updates, in_graph, keep = setup.updates, setup.updates_in_graph(), setup.keeps_gradients()
    inputs = list(graph.find_nodes(op="placeholder"))
    storages = [_storage(one) for one in gradients]
    lasting = {_storage(one) for one in (*inputs, *results)}
    for place, gradient in enumerate(gradients):
        if not isinstance(gradient, fx.Node):
            continue
        parameter = primals[place]
        shared = storages.count(storages[place]) > 1 or storages[place] in lasting
        copies = shared or not same_layout(gradient, parameter)
        take = TakeGradient(updates, copies)
        if in_graph:
            take.scratch_bytes = updates.scratch_bytes(parameter, parameter.stride())
            take.scratch_bytes += copies * parameter.numel() * parameter.element_size()
            take.can_wait = not copies and updates.is_batched(parameter)
            if not (copies or take.can_wait or keep):
                take.writes = (0, 1)  # the update may use the gradient's memory
        node = graph.call_function(take, (inputs[place], gradient))
        node.meta = {"val": None, BACKWARD: True, UPDATE: True}


def _storage(one: Any) -> int | None:
    return facts_of(one).storage if isinstance(one, fx.Node) else None


def same_layout(gradient: fx.Node, parameter: torch.Tensor) -> bool:
    """Whether a gradient fills its storage and has the layout that AccumulateGrad keeps."""
    val = gradient.meta["val"]
    whole = val.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    return bool(whole and val.stride() == parameter.stride() and val.dtype == parameter.dtype)


def constants(*modules: fx.GraphModule) -> torch.nn.Module:
    """A module that holds the constants of the graphs."""
    root = torch.nn.Module()
    for module in modules:
        for name, value in {**vars(module)["_buffers"], **vars(module)["_modules"]}.items():
            setattr(root, name, value)
        for node in module.graph.nodes:
            if node.op == "get_attr" and not hasattr(root, str(node.target)):
                setattr(root, str(node.target), getattr(module, str(node.target)))
    return root
