"""The graph of a whole step for one set of shapes, and one run of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx
from torch._dynamo.utils import preserve_rng_state

from memplan.runtime.graph.execute import Executable
from memplan.runtime.graph.ordering import Ordering
from memplan.runtime.graph.program import OF_PARAMETER, Program, facts_of
from memplan.runtime.graph.report import ProgramReport
from memplan.runtime.graph.updates import SameArithmetic, Updates

_MOST_MADE_AGAIN = 8
"""Times that a graph is made again because the arithmetic of an update changed."""


@dataclass(frozen=True, eq=False)
class Made:
    """A graph in its order."""

    program: Program
    ordering: Ordering
    recomputed: int
    """Operators that run a second time."""
    classes: list[SameArithmetic]
    first_only: bool
    """Made without the state of some optimizer, whose later steps are others."""
    primals: list[Any]
    """For these the updates are operators of the graph; None in the places of others."""

    @property
    def peak_bytes(self) -> int:
        return self.ordering.report.ordered_peak_bytes

    @cached_property
    def executable(self) -> Executable:
        program = self.program
        return Executable(
            self.ordering.nodes, program.placeholders, program.output, whole_step=True
        )


@dataclass(eq=False)
class Compiled:
    """The graph of one set of shapes."""

    make: Callable[[list[Any]], Made]
    """For primals of the same sizes, as the optimizers are now."""
    made: Made
    updates: Updates
    results: int
    calls: int = 0
    made_again: int = 0
    began: bool = False
    """Whether the last call came to the graph's first operator."""

    def written_until(self, error: BaseException) -> list[str]:
        """Inputs other than trained parameters that the graph had begun to write, by name."""
        program = self.made.program
        inputs = set(program.inputs)
        return [
            program.storages[index].name
            for node in self._ran_until(error)
            if not facts_of(node).update
            for index in facts_of(node).writes
            if index in inputs
        ]

    def _ran_until(self, error: BaseException) -> list[fx.Node]:
        executable = self.made.executable
        if not self.began:
            return []
        failed = executable.failed_at(error)
        return executable.nodes if failed is None else executable.nodes[: failed + 1]

    def report(self) -> ProgramReport:
        made = self.made
        return replace(made.ordering.report, recomputed=made.recomputed, calls=self.calls)

    def run(self, primals: list[Any]) -> list[Any]:
        """Forward's results. Empties the list, so that nothing but its owners holds an input."""
        self.began = False
        if not self._fits(primals):
            self._make_again(primals)
            if not self.updates.refresh(self.made.classes):
                self.updates.whole = True
                self._make_again(primals)
        self.calls += 1
        self.began = True
        try:
            results = list(self.made.executable(primals)[: self.results])
        except BaseException as error:
            begun = (node.meta.get(OF_PARAMETER) for node in self._ran_until(error))
            self.updates.done |= {one for one in begun if one is not None}
            raise
        self.updates.done |= {id(p) for one in self.made.classes for p in one.parameters}
        return results

    def _make_again(self, primals: list[Any]) -> None:
        self.made_again += 1
        self.updates.whole |= self.made_again >= _MOST_MADE_AGAIN
        with preserve_rng_state():
            self.made = self.make(primals)

    def _fits(self, primals: list[Any]) -> bool:
        """Whether the graph updates these parameters as the optimizers do now."""
        made, updates = self.made, self.updates
        if made.first_only and self.calls and updates.in_graph:
            return False
        known = zip(made.primals, primals, strict=True)
        if any(one is not None and one is not now for one, now in known):
            return False
        return not made.classes or (updates.in_graph and updates.refresh(made.classes))
