"""The graph of a whole step for one set of shapes, and one run of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch._dynamo.utils import preserve_rng_state

from memplan.runtime.graph.execute import Executable
from memplan.runtime.graph.joint import Joint
from memplan.runtime.graph.ordering import Ordering
from memplan.runtime.graph.program import Program, facts_of
from memplan.runtime.graph.report import ProgramReport
from memplan.runtime.graph.updates import UpdatePlan


@dataclass(frozen=True, eq=False)
class OrderedStep:
    """The graph of a step and the order in which its operators run."""

    program: Program
    ordering: Ordering
    recomputed: int
    """Number of operators that run a second time in backward."""

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
    updates: UpdatePlan
    joint: Joint
    calls: int = 0
    began: bool = False
    """Whether the last call reached the graph's first operator."""

    def written_until(self, error: BaseException) -> list[str]:
        """Names of inputs, no trained parameters, that the graph had begun to write."""
        program, executable = self.step.program, self.step.executable
        inputs, failed = set(program.inputs), executable.failed_at(error)
        ran = executable.nodes if failed is None else executable.nodes[: failed + 1]
        return [
            program.storages[index].name
            for node in (ran if self.began else ())
            if not facts_of(node).update
            for index in facts_of(node).writes
            if index in inputs
        ]

    def report(self) -> ProgramReport:
        step = self.step
        return replace(step.ordering.report, recomputed=step.recomputed, calls=self.calls)

    def run(self, primals: list[Any]) -> list[Any]:
        """Run the step and return forward's results. `primals` is emptied, so that inputs are freed
        as soon as their owners release them."""
        self.began = False
        if self.updates.begin(primals[place] for place in self.joint.trained):
            with preserve_rng_state():
                self.step = self.build(primals)
        self.calls += 1
        self.began = True
        return list(self.step.executable(primals)[: self.joint.results])
