"""What of a step can be dropped and made again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memplan.phases import step_graph
from tests.capturing.jobs import record
from tests.phases.step_jobs import JOBS, Two, by_module, training


def test_what_autograd_saves_can_be_dropped() -> None:
    graph = step_graph(record(JOBS["mlp"]))
    hidden = 32 * 256
    assert by_module(graph) == {
        "addmm": 4 * hidden,  # gelu's input
        "native_dropout": 4 * hidden + hidden,  # the next layer's input, and the mask
    }


def test_in_place_operators_are_part_of_a_value() -> None:
    graph = step_graph(record(JOBS["residual"]))
    size = 4 * 4 * 8 * 16 * 16
    found = by_module(graph)
    assert found["convolution"] == 2 * size  # batch norm's input; z, added to and rectified
    value = next(
        v
        for v in np.flatnonzero(graph.values.droppable).tolist()
        if sum(v in graph.ops.writes_of(row) for row in range(graph.forward_ops)) == 3
    )
    names = [graph.ops.name[r] for r in range(len(graph)) if value in graph.ops.writes_of(r)]
    assert names == ["aten.convolution.default", "aten.add_.Tensor", "aten.relu_.default"]


@pytest.mark.parametrize("name", ["checkpoint", "reentrant checkpoint", "checkpointed function"])
def test_inputs_of_checkpointed_blocks_are_held_by_python(name: str) -> None:
    graph = step_graph(record(JOBS[name]))
    assert by_module(graph) == {}


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh()
        self.seen = [hidden]
        return self.two(hidden).tanh()


def test_what_python_holds_cannot_be_dropped() -> None:
    # `hidden` stays in a list until the next forward; the output is what the script squares.
    def squared(out: torch.Tensor) -> torch.Tensor:
        return out.square().sum()

    graph = step_graph(record(training(Kept, (32, 64), loss=squared)))
    assert by_module(graph) == {}
    assert sum(name == "aten.tanh.default" for name in graph.ops.name) == 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.held = x.exp()
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.held


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(Doubled.apply(self.one(x).tanh()).sin())
        return out


def test_a_function_s_own_tensors_are_left_alone() -> None:
    graph = step_graph(record(training(WithFunction, (32, 64))))
    assert set(by_module(graph)) == {"tanh", "sin"}
    assert "aten.exp.default" in graph.ops.name


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        index = torch.zeros(32, dtype=torch.long, device=x.device)
        return torch.zeros_like(hidden).index_add(0, index, hidden).sigmoid().sin()


def test_operators_that_race_are_not_replayed() -> None:
    graph = step_graph(record(training(Scattered, (32, 64))))
    replayable = dict(zip(graph.ops.name, graph.ops.replayable.tolist(), strict=True))
    assert not replayable["aten.index_add.default"]
    assert replayable["aten.sigmoid.default"]
    assert "index_add" not in by_module(graph)


class Raw(nn.Module):
    def __init__(self, *, filled: bool) -> None:
        super().__init__()
        self.one, self.filled = nn.Linear(64, 64), filled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raw = torch.empty_like(x)
        if self.filled:
            raw.copy_(x)
        return (self.one(x) * raw).sin()


@pytest.mark.parametrize("filled", [True, False])
def test_memory_that_nobody_wrote_is_not_made_again(filled: bool) -> None:
    graph = step_graph(record(training(lambda: Raw(filled=filled), (32, 64))))
    row = graph.ops.name.index("aten.empty_like.default")
    assert bool(graph.ops.replayable[row]) is filled
    assert ("empty_like" in by_module(graph)) is filled


def test_operators_are_counted_in_their_call() -> None:
    def job() -> None:
        model, other = Two().to("cuda"), nn.Linear(64, 64).to("cuda")
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
        for _ in range(3):
            x = torch.randn(32, 64, device="cuda")
            with torch.no_grad():
                model(x)
            other(model(x)).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    graph = step_graph(record(job))
    ops = graph.ops
    places = [
        (int(ops.call[row]), int(ops.nth[row]))
        for row, name in enumerate(ops.name[: graph.forward_ops])
        if name == "aten.addmm.default" and ops.call[row] >= 0
    ]
    assert places == [(0, 0), (0, 1), (1, 0)]
    sines = [
        (int(ops.call[row]), int(ops.nth[row]))
        for row, name in enumerate(ops.name[: graph.forward_ops])
        if name == "aten.sin.default"
    ]
    assert sines[-3:] == [(0, 0), (0, 1), (-1, -1)]
    # What the call does without gradients before anything else is in the pass, and counted.
    row = max(r for r in range(graph.forward_ops) if ops.name[r] == "aten.amax.default")
    assert (int(ops.call[row]), int(ops.nth[row])) == (0, 0)
    # The model's output is read outside its call: it may be saved there.
    assert "tanh" not in by_module(graph)
