"""The graph of a step while it is recorded: inputs in front, and gates around what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.nested import nodes_in
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.program import FACTS, Facts, Input


class StepGraph:
    """An FX graph that grows at its end."""

    def __init__(self) -> None:
        self.fx = fx.Graph()
        self.inputs: list[Input] = []
        self.updating = 0
        """Above 0 inside `optimizer.step()`."""
        self._placeholders: list[fx.Node] = []
        self._gate: tuple[fx.Node, Callable[[Any], Any]] | None = None
        self._gated: set[fx.Node] = set()

    def placeholder(self) -> fx.Node:
        """For the next of `inputs`."""
        last = self._placeholders[-1] if self._placeholders else None
        where = self.fx.inserting_after(last) if last else self.fx.inserting_before(_first(self.fx))
        with where:
            node = self.fx.placeholder(f"in_{len(self.inputs)}")
        node.meta[FACTS] = Facts()
        self._placeholders.append(node)
        return node

    def call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        effect: bool = False,
    ) -> fx.Node:
        """A node, behind the gate that is closed around it. Its facts are the caller's to set."""
        needs = any(node in self._gated for node in nodes_in((args, kwargs)))
        if self._gate is None or not (effect or needs):
            if needs:
                raise NotCapturable("it uses what a scaler may leave out", refused_at())
            return self.fx.call_function(function, args, kwargs)
        skip, unless = self._gate
        node = self.fx.call_function(unless(function), (skip, *args), kwargs)
        self._gated.add(node)
        return node

    def free(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A node that has no kernel and makes no bytes."""
        node = self.call(function, args, kwargs)
        node.meta[FACTS] = Facts(free=True)
        return node

    @contextmanager
    def gated(self, skip: fx.Node, unless: Callable[[Any], Any]) -> Iterator[None]:
        """Inside, operators are left out where `skip` is true; `unless` makes them so."""
        before, self._gate = self._gate, (skip, unless)
        try:
            yield
        finally:
            self._gate = before

    def is_gated(self, node: fx.Node) -> bool:
        """Whether there may be nothing where the node's result should be."""
        return node in self._gated


def _first(graph: fx.Graph) -> fx.Node:
    return next(iter(graph.nodes), graph._root)
