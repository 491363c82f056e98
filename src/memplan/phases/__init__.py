"""A `Trace` cut into steps and phases; which steps repeat; a step as a graph."""

from memplan.phases.op_graph import op_graph
from memplan.phases.requests import first_difference, is_steady, request_signature
from memplan.phases.spans import PhaseSpans
from memplan.phases.step_graph import plain_peak, step_graph, step_graphs
from memplan.phases.steps import Step, StepTable, find_steps

__all__ = [
    "PhaseSpans",
    "Step",
    "StepTable",
    "find_steps",
    "first_difference",
    "is_steady",
    "op_graph",
    "plain_peak",
    "request_signature",
    "step_graph",
    "step_graphs",
]
