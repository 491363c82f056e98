"""What a recorded step left behind, and the program made from it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from memplan.runtime.compiled.in_place import add_in_place
from memplan.runtime.compiled.lifting import Before, Was
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.op_limits import ITEM
from memplan.runtime.compiled.program import (
    Gradient,
    Kind,
    Leaf,
    Place,
    Rebound,
    StepProgram,
    facts_of,
)
from memplan.runtime.compiled.random_state import read_random_state, write_random_state
from memplan.runtime.compiled.recording import Recorder
from memplan.runtime.compiled.scalars import Symbolic, scalar_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class _Outputs:
    """The graph's outputs, each node once."""

    def __init__(self, recorder: Recorder) -> None:
        self.nodes: dict[fx.Node, int] = {}
        self._recorder = recorder
        self._aliases: dict[fx.Node, fx.Node] = {}

    def number(self, node: fx.Node) -> int:
        return self.nodes.setdefault(node, len(self.nodes))

    def of(self, tensor: torch.Tensor) -> int:
        """Another tensor on a parameter's memory is not the parameter."""
        node = self._recorder.tensors.node_of(tensor)
        if node.op != "placeholder" or self._recorder.tensors.is_input(node, tensor):
            return self.number(node)
        if node not in self._aliases:
            self._aliases[node] = self._recorder.tensors.alias(node)
        return self.number(self._aliases[node])


def finish(recorder: Recorder, before: Before, result: Any) -> StepProgram:
    """The program of a step that was recorded to its end. Raises NotCapturable."""
    recorder.random.states.check_all()
    outputs = _Outputs(recorder)
    gradients, frees = _gradients(recorder, before, outputs)
    rebound = _rebound(recorder, before, outputs)
    leaves, spec = pytree.tree_flatten(result)
    result_leaves = [_leaf(recorder, leaf, outputs) for leaf in leaves]
    if any(recorder.graph.is_gated(node) for node in outputs.nodes):
        raise NotCapturable("it uses what a scaler may leave out")
    graph = recorder.graph.fx
    graph.output(tuple(outputs.nodes))
    foreseen = recorder.numbers.escapes.foreseen()
    _drop_unused(recorder, set() if foreseen is None else foreseen.inputs)
    recorder.tensors.note_results()
    add_in_place(graph, recorder.tensors.storages)
    graph.lint()
    module = fx.GraphModule(nn.Module(), graph, "Step")
    return StepProgram(
        graph_module=module,
        inputs=recorder.graph.inputs,
        storages=recorder.tensors.storages,
        frees=frees,
        gradients=gradients,
        rebound=rebound,
        pins=list(recorder.numbers.pins.values()),
        foreseen=foreseen,
        result_spec=spec,
        result_leaves=result_leaves,
        result_name=type(result).__name__,
    )


def _gradients(
    recorder: Recorder, before: Before, outputs: _Outputs
) -> tuple[list[Gradient], list[Place]]:
    gradients, frees = [], []
    for place, was in before.gradients:
        now = place.read()
        if was is not None and was.is_now(now):
            continue
        if was is not None:
            frees.append(place)
        if now is None:
            if was is not None:
                gradients.append(Gradient(place, None))
            continue
        gradients.append(Gradient(place, outputs.of(now)))
    return gradients, frees


def _rebound(recorder: Recorder, before: Before, outputs: _Outputs) -> list[Rebound]:
    rebound = []
    for kind, place, was in before.tensors:
        try:
            now = place.read()
        except (KeyError, AttributeError, IndexError):
            now = None
        if was.is_now(now):
            _check_needs(place, was, now)
            continue
        fixed = kind is Kind.PARAMETER or isinstance(place.owner, tuple)
        if fixed or not isinstance(now, torch.Tensor) or isinstance(now, nn.Parameter):
            raise NotCapturable(
                f"{place.path} is replaced in the step", "", "write it in place: copy_, add_"
            )
        rebound.append(Rebound(place, outputs.of(now)))
    for place, tensor, was in before.arguments:
        if not was.is_now(tensor):
            raise NotCapturable(
                f"{place.path} is made another tensor in the step (its data, shape or strides)",
                "",
                "write its content only, or work on a copy",
            )
        _check_needs(place, was, tensor)
    for name in before.new_state():
        raise NotCapturable(
            f"the optimizer made {name} in this step",
            "",
            "let one plain step come first",
            later=True,  # an accumulation over calls updates first in a later one
        )
    return rebound


def _check_needs(place: Place, was: Was, tensor: torch.Tensor) -> None:
    if tensor.requires_grad != was.requires_grad:
        raise NotCapturable(
            f"requires_grad of {place.path} is changed in the step", "", "x.detach() has its own"
        )


def _leaf(recorder: Recorder, leaf: Any, outputs: _Outputs) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        if leaf.requires_grad and not recorder.operators.went_backward:
            raise NotCapturable(
                "it returns a tensor to call backward on", "", "call backward inside the step"
            )
        return Leaf(outputs.of(leaf))
    if isinstance(leaf, Symbolic):
        scalar = scalar_of(leaf)
        if scalar is not None:
            scalar.check("")
            if scalar.node is None:
                return Leaf(None, scalar.value)
            return Leaf(outputs.number(scalar.node))
    if isinstance(leaf, _PLAIN):
        return Leaf(None, leaf)
    raise NotCapturable(
        f"it returns a {type(leaf).__name__}", "", "return tensors, numbers, tuples or dicts"
    )


def _drop_unused(recorder: Recorder, needed: Collection[str]) -> None:
    """Views and numbers that nothing needs, and inputs that only they needed, but for those that
    are `needed`, by name; random states that are kept where nothing is random."""
    drawing = {
        chain
        for node in recorder.graph.fx.nodes
        if node.op not in ("placeholder", "output") and node.target is not write_random_state
        for chain in facts_of(node).chains
        if node.target is not read_random_state
    }
    for node in reversed(recorder.graph.fx.nodes):
        if node.op == "output" or node.users or node.name in needed:
            continue
        if node.target is write_random_state and not drawing & {*facts_of(node).chains}:
            recorder.graph.fx.erase_node(node)
            continue
        if (
            node.op == "placeholder"
            or facts_of(node).free
            or node.target is ITEM
            or node.target is read_random_state
        ):
            recorder.graph.fx.erase_node(node)
    kept = {node.name for node in recorder.graph.fx.nodes if node.op == "placeholder"}
    recorder.graph.inputs[:] = [one for one in recorder.graph.inputs if one.name in kept]
