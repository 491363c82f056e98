"""A `Trace` cut into steps, phases and module calls; which steps repeat; a step as a graph."""

from memplan.phases.op_graph import op_graph
from memplan.phases.requests import StepSignature, first_difference, is_steady, request_signature
from memplan.phases.spans import ModuleSpans, PhaseSpans
from memplan.phases.step_graph import plain_peak, step_graph
from memplan.phases.steps import Step, StepTable, find_steps

__all__ = [
    "ModuleSpans",
    "PhaseSpans",
    "Step",
    "StepSignature",
    "StepTable",
    "find_steps",
    "first_difference",
    "is_steady",
    "op_graph",
    "plain_peak",
    "request_signature",
    "step_graph",
]
