"""A `Trace` cut into steps and phases; which steps repeat; a step as a graph."""

from memplan.phases.op_graph import op_graph
from memplan.phases.requests import request_signature
from memplan.phases.step_graph import plain_peak, step_graph, step_graphs
from memplan.phases.steps import Step, find_steps

__all__ = [
    "Step",
    "find_steps",
    "op_graph",
    "plain_peak",
    "request_signature",
    "step_graph",
    "step_graphs",
]
