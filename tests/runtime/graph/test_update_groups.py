"""Optimizers whose kernels take many tensors update many parameters in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplan
from bench.recompute.tracker import measure
from memplan.order.evaluate import program_order
from memplan.order.validate import slow_peak
from memplan.runtime import one_update
from memplan.runtime.graph import ordering
from memplan.runtime.graph.operator_graph import OperatorGraph
from memplan.runtime.graph.update_groups import group_updates
from memplan.runtime.graph.updates import Updates
from tests.runtime.graph.training import Job, assert_as_plain, captures_steps, classifier

pytestmark = captures_steps
WIDTH = 96
LAYERS = 8


class Deep(nn.Module):
    """Gradients are most of what its step needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def deep(make: Any) -> Job:
    return classifier(Deep, make, shape=(2, WIDTH), count=3)


def many_logits(make: Any, count: int = 3) -> Job:
    """What its step needs most of is there when its first gradient comes."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 64))

    return classifier(build, make, shape=(512, 6), count=count)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, fused=True)


def foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01, foreach=True)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [one for one in model.parameters() if one.dim() > 1]
    rest = [one for one in model.parameters() if one.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "lr": 0.1}, {"params": rest}]
    return torch.optim.SGD(groups, 0.2, fused=True)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each call of an optimizer updated."""
    found: list[int] = []
    alone = one_update.alone

    def counted(optimizer: Any, group: Any, *parameters: Any) -> Any:
        found.append(len(parameters))
        return alone(optimizer, group, *parameters)

    monkeypatch.setattr(one_update, "alone", counted)
    return found


@pytest.mark.parametrize(("make", "groups"), [(fused, 1), (foreach, 1), (two_groups, 2)])
def test_all_in_one_call_where_memory_allows(make: Any, groups: int, sizes: list[int]) -> None:
    _, job = assert_as_plain(lambda: many_logits(make))
    parameters = len(list(job.model.parameters()))
    assert sizes == 3 * ([parameters] if groups == 1 else [parameters // 2] * 2)


@pytest.mark.parametrize("make", [fused, foreach, two_groups])
def test_gradients_do_not_wait_where_that_would_raise_the_peak(
    make: Any, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: list[tuple[int, int]] = []

    def noted(operators: OperatorGraph, order: Any, peak: Any) -> OperatorGraph:
        found = group_updates(operators, order, peak)
        peaks.append((peak(operators), peak(found)))
        return found

    monkeypatch.setattr(ordering, group_updates.__name__, noted)
    step, job = assert_as_plain(lambda: deep(make))
    assert all(grouped <= alone for alone, grouped in peaks)
    assert sum(sizes) == 3 * 2 * LAYERS
    assert len(sizes) > 3 * 2
    assert max(sizes) > 1  # those of biases
    parameters = list(job.model.parameters())
    held = [*parameters, *(v for of in job.optimizers[0].state.values() for v in of.values())]
    peak = measure(lambda: step(*job.batches[0]), [*held, *job.batches[0]]).peak_bytes
    assert peak <= step.report().programs[-1].ordered_peak_bytes + 512


@pytest.mark.parametrize("make", [fused, foreach])
def test_what_waits_is_in_the_promise(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another count of the bytes, of each operator in turn, gives the same peak."""
    seen: list[OperatorGraph] = []

    def noted(*given: Any) -> OperatorGraph:
        seen.append(group_updates(*given))
        return seen[-1]

    monkeypatch.setattr(ordering, group_updates.__name__, noted)
    step, _ = assert_as_plain(lambda: deep(make), order=False)
    graph = seen[-1].graph
    order = program_order(graph).tolist()
    assert slow_peak(graph, order) == step.report().programs[-1].ordered_peak_bytes


def test_gradients_of_earlier_calls(sizes: list[int]) -> None:
    assert_as_plain(lambda: many_logits(fused, count=4), accumulate=2)
    assert sizes == [6, 6]


def test_a_gradient_that_cannot_wait_does_not_end_the_wait_of_others(sizes: list[int]) -> None:
    """That of a sum is expanded: it is copied, and used at once."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 64)
            self.summed = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(self.first(x).tanh() * self.summed.sum())
            return found

    assert_as_plain(lambda: classifier(Summed, fused, shape=(512, 6), count=2))
    assert sorted(sizes) == [1, 1, 4, 4]


def test_an_error_while_gradients_wait(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step updates each parameter once."""
    job = many_logits(fused)
    step = memplan.compile(job.loss_fn, optimizer=job.optimizers[0], deadline_seconds=0.2)
    step(*job.batches[0])
    later = Updates.postpone

    def fails(self: Updates, parameter: torch.Tensor) -> None:
        later(self, parameter)
        raise torch.OutOfMemoryError("here")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Updates, later.__name__, fails)
        step(*job.batches[1])
    sizes.clear()
    step(*job.batches[2])
    assert sizes == [6]
