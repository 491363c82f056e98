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
from memplan.runtime.graph.program import PARAMETER_ID, Program, facts_of
from memplan.runtime.graph.report import ProgramReport
from memplan.runtime.graph.updates import UpdateClass, Updates

_MAX_REBUILDS = 8
"""After so many rebuilds for changed arithmetic, optimizers run their own step."""


@dataclass(frozen=True, eq=False)
class OrderedStep:
    """The graph of a step and the order in which its operators run."""

    program: Program
    ordering: Ordering
    recomputed: int
    """Number of operators that run a second time in backward."""
    classes: list[UpdateClass]
    first_only: bool
    """Whether some optimizer had no state yet when the graph was built: later steps differ."""
    primals: list[Any]
    """Parameters whose updates are operators of the graph, in the places of the graph's inputs;
    None for every other input."""

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
class CompiledGraph:
    """The graph of one set of shapes."""

    build: Callable[[list[Any]], OrderedStep]
    """Builds the graph anew for inputs of the same sizes and the optimizers' current options."""
    step: OrderedStep
    updates: Updates
    results: int
    calls: int = 0
    rebuilds: int = 0
    began: bool = False
    """Whether the last call reached the graph's first operator."""

    def written_until(self, error: BaseException) -> list[str]:
        """Names of inputs, no trained parameters, that the graph had begun to write."""
        program = self.step.program
        inputs = set(program.inputs)
        return [
            program.storages[index].name
            for node in self._ran_until(error)
            if not facts_of(node).update
            for index in facts_of(node).writes
            if index in inputs
        ]

    def _ran_until(self, error: BaseException) -> list[fx.Node]:
        executable = self.step.executable
        if not self.began:
            return []
        failed = executable.failed_at(error)
        return executable.nodes if failed is None else executable.nodes[: failed + 1]

    def report(self) -> ProgramReport:
        step = self.step
        return replace(step.ordering.report, recomputed=step.recomputed, calls=self.calls)

    def run(self, primals: list[Any]) -> list[Any]:
        """Run the step and return forward's results. `primals` is emptied, so that inputs are freed
        as soon as their owners release them."""
        self.began = False
        if not self._fits(primals):
            self._rebuild(primals)
            if not self.updates.refresh_numbers(self.step.classes):
                self.updates.by_optimizer = True
                self._rebuild(primals)
        self.calls += 1
        self.began = True
        try:
            results = list(self.step.executable(primals)[: self.results])
        except BaseException as error:
            begun = (node.meta.get(PARAMETER_ID) for node in self._ran_until(error))
            self.updates.updated |= {one for one in begun if one is not None}
            raise
        self.updates.updated |= {id(p) for one in self.step.classes for p in one.parameters}
        return results

    def _rebuild(self, primals: list[Any]) -> None:
        self.rebuilds += 1
        self.updates.by_optimizer |= self.rebuilds >= _MAX_REBUILDS
        with preserve_rng_state():
            self.step = self.build(primals)

    def _fits(self, primals: list[Any]) -> bool:
        """Whether the graph still updates these parameters the way the optimizers would."""
        step, updates = self.step, self.updates
        if step.first_only and self.calls and updates.in_graph:
            return False
        known = zip(step.primals, primals, strict=True)
        if any(one is not None and one is not now for one, now in known):
            return False
        return not step.classes or (updates.in_graph and updates.refresh_numbers(step.classes))
