"""PyTorch's own budget: `torch._functorch.config.activation_memory_budget`.

The joint graph of forward, loss and backward is traced once by `torch.compile`; PyTorch's min-cut
partitioner then cuts it for every budget, and each pair of graphs is run operator by operator, as
the `aot_eager` backends do, with every tensor let go of after its last use. That is the least that
the graphs can take without fusion. Operators are not decomposed: run unfused, decompositions would
only raise these peaks.

Dropout is off here: below a budget of 1 its gradients are not reliable.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import FlopCounterMode

from bench.recompute.case import Training
from bench.recompute.tracker import measure

BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

Graph = torch.fx.GraphModule


@dataclass(frozen=True)
class Point:
    """One setting of PyTorch's budget, as measured. Bytes beyond weights, buffers and inputs."""

    solver: str
    budget: float
    beyond_bytes: int
    flops: int
    """Of forward and backward, recomputation included."""


@dataclass(frozen=True)
class _Cut:
    solver: str
    budget: float
    forward: Graph
    backward: Graph


def solvers() -> list[str]:
    """The knapsack solvers that can run here: `ilp` needs scipy."""
    return ["dp", "ilp"] if importlib.util.find_spec("scipy") else ["dp"]


def curve(training: Training, budgets: tuple[float, ...] = BUDGETS) -> list[Point]:
    """Peak and FLOPs at each budget by each solver, in that order."""
    trace = _Trace(budgets)
    trace.of(training)
    points = []
    for cut in trace.cuts:
        resident = [tensor for tensor in trace.arguments if isinstance(tensor, torch.Tensor)]
        step = trace.step(cut)
        beyond = measure(step, resident).beyond_bytes
        points.append(Point(cut.solver, cut.budget, beyond, flops(step)))
    return points


def flops(step: Callable[[], object]) -> int:
    """Floating point operations of a step by PyTorch's counter: products and convolutions."""
    counter = FlopCounterMode(display=False)
    with counter:
        step()
    return int(counter.get_total_flops())


class _Trace:
    """The joint graph of a training step cut once per budget, with the arguments of a real run."""

    def __init__(self, budgets: tuple[float, ...]) -> None:
        self._budgets = budgets
        self._outputs = 0
        self.cuts: list[_Cut] = []
        self.arguments: list[Any] = []

    def of(self, training: Training) -> None:
        """Trace and cut. Raises RuntimeError when the step is not one graph."""
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=self._keep_arguments,
            bw_compiler=lambda graph, _: graph,
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )

        def forward(*inputs: torch.Tensor) -> torch.Tensor:
            return training.loss(training.module(*inputs))

        torch.compile(forward, backend=backend, fullgraph=True)(*training.inputs)
        if not self.cuts or not self.arguments:
            raise RuntimeError("nothing was traced")

    def _partition(self, joint: Graph, inputs: Any, **options: Any) -> tuple[Graph, Graph]:
        self._outputs = options["num_fwd_outputs"]
        for solver in solvers():
            for budget in self._budgets:
                with functorch_config.patch(
                    activation_memory_budget=budget, activation_memory_budget_solver=solver
                ):
                    pair = min_cut_rematerialization_partition(
                        copy.deepcopy(joint), inputs, **options
                    )
                self.cuts.append(_Cut(solver, budget, *pair))
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def _keep_arguments(self, graph: Graph, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.arguments = list(arguments)
            return graph(*arguments)

        return run

    def step(self, cut: _Cut) -> Callable[[], object]:
        """Forward and backward of one cut; the gradients."""

        def run() -> object:
            saved = torch.fx.Interpreter(cut.forward).boxed_run(list(self.arguments))
            saved = list(saved)
            del saved[: self._outputs]
            wanted = sum(node.op == "placeholder" for node in cut.backward.graph.nodes)
            saved += [torch.ones(())] * (wanted - len(saved))
            return torch.fx.Interpreter(cut.backward).boxed_run(saved)

        return torch.no_grad()(run)
