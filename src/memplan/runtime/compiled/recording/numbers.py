"""The Python numbers of a recorded step as nodes: hyperparameters, and what tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memplan.runtime.compiled.foreseen import Escapes
from memplan.runtime.compiled.known_storages import KnownStorages
from memplan.runtime.compiled.lines import refused_at, user_line
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.op_limits import ITEM
from memplan.runtime.compiled.program import FACTS, Facts, Input, Kind, Pin, Place
from memplan.runtime.compiled.recording.step_graph import StepGraph
from memplan.runtime.compiled.scalars import Scalar, symbolic

_A_LOOK_OUTSIDE = "return the tensor or tensor.item(), and look at it outside the step"
_CHECKED_ARGUMENTS = "torch.distributions.Distribution.set_default_validate_args(False)"


class Numbers:
    """Makes the step's symbolic numbers, and is whom they tell what Python does with them."""

    def __init__(
        self, graph: StepGraph, known: KnownStorages, refuse: Callable[[NotCapturable], None]
    ) -> None:
        self.pins: dict[tuple[int, Any], Pin] = {}
        self.escapes = Escapes(graph.fx, graph.inputs, known.storages)
        self.refuse = refuse
        self._graph = graph
        self._known = known

    def input(self, place: Place, value: float) -> Any:
        """A Python number that may be another one at each step."""
        node = self._graph.placeholder()
        number = len(self._graph.inputs)
        self._graph.inputs.append(Input(node.name, Kind.SCALAR, place, value=value))
        return symbolic(Scalar(self, value, node, frozenset({number})))

    def late(self, value: float) -> Any:
        """A number that is not the same in the next step, though nothing computes it."""
        return symbolic(Scalar(self, value, None, late=True))

    def item(self, mapped: list[Any], value: Any) -> Any:
        """What `tensor.item()` gives, whose arguments are `mapped` and whose result is `value`."""
        if isinstance(value, (complex, torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotCapturable("the value of a complex or symbolic tensor", refused_at())
        if self._known.is_fixed(mapped):
            return value
        node = self._graph.call(ITEM, tuple(mapped), effect=True)
        used = self._known.of_nodes(mapped)
        node.meta[FACTS] = Facts(
            reads=used, uses=used, source=user_line(), update=self._graph.updating > 0
        )
        return symbolic(Scalar(self, value, node, measured=True))

    def arithmetic(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
        return self._graph.free(function, arguments)

    def escaped(self, scalar: Scalar, how: str) -> None:
        if scalar.measured:
            if not self._is_foreseen(scalar, how):
                where = refused_at()
                hint = _CHECKED_ARGUMENTS if "torch/distributions/" in where else _A_LOOK_OUTSIDE
                self.refuse(NotCapturable(how, where, hint))
            return
        for number in scalar.places:
            one = self._graph.inputs[number]
            known = self.pins.get((number, None))
            if known is None:
                self.pins[number, scalar.test] = Pin(one.place, one.value, scalar.test)

    def _is_foreseen(self, scalar: Scalar, how: str) -> bool:
        node = scalar.node
        if node is None or self._graph.is_gated(node):
            return False
        return self.escapes.add(node, scalar.value, f"{how} ({user_line()})")
