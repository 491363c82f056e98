"""`memplan.compile(..., budget=...)`: what is recomputed leaves the same bits, and the peak that is
promised is the one that the step's own graph has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import memplan.api as api
from memplan.recompute.selection import Selection
from memplan.runtime.compiled.capture import record_step
from memplan.runtime.compiled.dependencies import operators
from memplan.runtime.compiled.duplicate import with_recomputation
from memplan.runtime.compiled.passes import passes_of
from memplan.runtime.compiled.program import facts_of
from memplan.types.errors import InfeasibleError
from tests.runtime.compiled.test_bit_identity import adam, cross_entropy
from tests.runtime.compiled.training import Job, batches, run_both


class Deep(nn.Module):
    """Blocks of a convolution, a batch norm and a ReLU in place, each added to what came in."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(depth))
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + self.drop(F.relu(norm(conv(x)), inplace=True))
        return self.last(x.mean((2, 3)))


class Layers(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True)
            for _ in range(depth)
        ]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).mean(1))


class Views(nn.Module):
    """One product, of whose several views backward needs each."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(16, 48) for _ in range(depth))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.wide):
            q, k, v = (
                layer(x).chunk(3, -1) if number % 2 else layer(x).unflatten(-1, (3, 16)).unbind(-2)
            )
            x = x + F.scaled_dot_product_attention(q, k, v)
        return self.last(x.mean(1))


def maker(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[], Job]:
    def make() -> Job:
        model = build()
        optimizer = adam(model.parameters())
        return Job(model, optimizer, cross_entropy(model, optimizer), batches(shape))

    return make


MODELS = {
    "deep": maker(Deep, (4, 3, 12, 12)),
    "layers": maker(Layers, (8, 24, 16)),
    "views": maker(Views, (8, 24, 16)),
}


def ordered_peak(make: Callable[[], Job], **options: Any) -> int:
    torch.manual_seed(1)
    job = make()
    step = api.compile(
        job.step, model=job.model, optimizer=job.optimizer, deadline_seconds=0.5, **options
    )
    for batch in job.batches[:2]:
        step(*batch)
    return step.report().programs[0].ordered_peak_bytes


@pytest.mark.parametrize(
    ("name", "part"), [("deep", 0.9), ("deep", 0.7), ("layers", 0.75), ("views", 0.8)]
)
def test_a_budget_is_kept_with_the_same_bits(name: str, part: float) -> None:
    make = MODELS[name]
    job = make()
    lasting = 4 * sum(p.nbytes for p in job.model.parameters())
    budget = lasting + int(part * (ordered_peak(make) - lasting))
    compiled, _ = run_both(make, budget=budget, deadline_seconds=2.0)
    report = compiled.report()
    assert report.compiled_calls == 4, report
    (program,) = report.programs
    assert program.ordered_peak_bytes <= budget
    assert program.recomputed > 0
    assert "run twice" in str(program)


def test_a_budget_that_the_order_keeps_recomputes_nothing() -> None:
    make = MODELS["deep"]
    budget = ordered_peak(make)
    compiled, _ = run_both(make, budget=budget, deadline_seconds=2.0)
    assert compiled.report().programs[0].recomputed == 0


def test_a_budget_that_cannot_be_met_says_the_least() -> None:
    job = MODELS["deep"]()
    step = api.compile(
        job.step, model=job.model, optimizer=job.optimizer, budget="1KiB", deadline_seconds=1.0
    )
    step(*job.batches[0])
    with pytest.raises(InfeasibleError, match="the least found is") as caught:
        step(*job.batches[1])
    assert "budget=" in caught.value.hint


def test_accumulated_micro_batches_are_recomputed_each() -> None:
    def make() -> Job:
        model = Layers()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor) -> float:
            optimizer.zero_grad()
            total = 0.0
            for inputs, labels in zip(x.split(4), y.split(4), strict=True):
                loss = F.cross_entropy(model(inputs), labels) / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            return total

        return Job(model, optimizer, step, batches((8, 24, 16)))

    lasting = 4 * sum(p.nbytes for p in make().model.parameters())
    budget = lasting + int(0.75 * (ordered_peak(make) - lasting))
    compiled, _ = run_both(make, budget=budget, deadline_seconds=2.0)
    report = compiled.report()
    assert report.compiled_calls == 4, report
    assert report.programs[0].recomputed > 0


def test_a_replay_that_needs_a_drawn_mask_keeps_the_mask() -> None:
    """A checkpointed block's mask dies in forward: drawing it again would move the generator."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU())
    last = nn.Linear(8, 8)
    model = nn.Sequential(block, last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        hidden = checkpoint(block, x, use_reentrant=False)
        loss = last(hidden).tanh().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(4, 8),)
    step(*batch)
    recorded = record_step(step, model=model, optimizer=optimizer, args=batch).program
    assert recorded is not None
    plain = operators(recorded)
    (one,) = passes_of(plain)
    draws = [node for node in plain.nodes if facts_of(node).chains]
    chosen = [value for value in range(len(one.graph.values)) if one.graph.values.droppable[value]]
    assert chosen
    for value in chosen:
        again, count = with_recomputation(plain, [(one, Selection((frozenset({value}),)))])
        drawn = [node for node in operators(again).nodes if facts_of(node).chains]
        assert count
        assert [node.target for node in drawn] == [node.target for node in draws]


def test_views_that_come_several_at_once_are_of_what_is_recomputed() -> None:
    """`unbind` and `chunk` of a product that is dropped: backward reads the new one's views."""
    torch.manual_seed(0)
    job = MODELS["views"]()
    job.step(*job.batches[0])
    recorded = record_step(
        job.step, model=job.model, optimizer=job.optimizer, args=job.batches[1]
    ).program
    assert recorded is not None
    plain = operators(recorded)
    (one,) = passes_of(plain)
    results: dict[fx.Node, set[int]] = {}  # of an operator that has several, all at once
    for value, droppable in enumerate(one.graph.values.droppable):
        if droppable:
            maker = plain.program.storages[one.storages[value]].maker
            results.setdefault(maker, set()).add(value)
    assert results
    for dropped, values in results.items():
        again, _ = with_recomputation(plain, [(one, Selection((frozenset(values),)))])
        operators(again)  # checks that whoever uses it runs after what makes it
        name, backward = dropped.name, [n for n in operators(again).nodes if facts_of(n).backward]
        assert not any(name in from_free_nodes(node) for node in backward), name


def from_free_nodes(node: fx.Node) -> set[str]:
    """Operators that a node's arguments come from, through views."""
    found = set()
    for needed in node.all_input_nodes:
        views = needed.op != "placeholder" and facts_of(needed).free
        found |= from_free_nodes(needed) if views else {needed.name}
    return found
