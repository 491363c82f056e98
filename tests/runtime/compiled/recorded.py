"""Small steps, recorded: what the tests of capture share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memplan.runtime.compiled.capture import record_step
from memplan.runtime.compiled.dependencies import Operators
from memplan.runtime.compiled.execute import Executable
from memplan.runtime.compiled.program import RecordedStep, StepProgram


class Residual(nn.Module):
    """Convolutions around a skip, with batch norm and dropout: fan-in, views, buffers, draws."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.drop(torch.sigmoid(self.inner(x)) * x)
        return self.head(x.mean((2, 3)))


@dataclass
class Job:
    """A model with its optimizer and step, one plain call of the step done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]

    def record(self, batch: int = 1) -> RecordedStep:
        return record_step(
            self.step, model=self.model, optimizer=self.optimizer, args=self.batches[batch]
        )

    def program(self) -> StepProgram:
        recorded = self.record()
        assert recorded.program is not None, recorded.refusal
        return recorded.program

    def everything(self) -> list[Tensor]:
        """Weights, gradients, buffers and optimizer state."""
        found = [p.detach() for p in self.model.parameters()]
        found += [p.grad for p in self.model.parameters() if p.grad is not None]
        found += list(self.model.buffers())
        for state in self.optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
        return found


def residual_job(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **options: Any
) -> Job:
    """A plain step of `Residual` on 8 × 8 images: cross entropy, backward, update."""
    torch.manual_seed(0)
    model = Residual()
    chosen = optimizer(model.parameters(), **options)

    def step(x: Tensor, y: Tensor) -> Tensor:
        chosen.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        chosen.step()
        return loss.detach()

    job = Job(model, chosen, step, image_batches())
    step(*job.batches[0])
    return job


def image_batches(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(2, 3, 8, 8), torch.randint(0, 4, (2,))) for _ in range(count)]


def job_of(body: Callable[..., Any], width: int = 6) -> Job:
    """A job whose step is `body(model, optimizer, x)`, on a small linear model."""
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        return body(model, optimizer, x)

    job = Job(model, optimizer, step, [(torch.randn(3, width),) for _ in range(4)])
    step(*job.batches[0])
    return job


def run(operators: Operators, order: Sequence[int], args: tuple[Any, ...]) -> Any:
    """One step of a program in the given order of its operators."""
    program = operators.program
    values = program.read(tree_leaves((args, {})))
    for place in program.frees:
        place.clear()
    outputs = executable(operators, order)(values)
    program.store(outputs)
    for effect in program.effects:
        effect()
    return program.result_of(outputs)


def executable(operators: Operators, order: Sequence[int]) -> Executable:
    graph = operators.program.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return Executable(operators.schedule(order), placeholders, graph.output_node())
