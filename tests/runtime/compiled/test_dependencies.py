"""Any order that a step's graph allows gives the same bits; what it forbids would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memplan.runtime.compiled.dependencies import Operators, operators
from memplan.runtime.compiled.program import facts_of
from tests.order.graphs import random_order
from tests.runtime.compiled.recorded import Job, job_of, residual_job, run


def in_place(model: Any, optimizer: Any, x: Tensor) -> Any:
    """Views that are written, read before and after."""
    optimizer.zero_grad()
    table = torch.zeros(4, 6)
    early = table[1:2] + 1
    table[1].add_(x[0])
    rows = table[0:3] * 2
    table.t()[2].mul_(3)
    late = table.sum(1)
    loss = (model(x) * (rows + early)).square().mean() + late.sum()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            before = parameter.clone()
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad.copy_(before)
    return loss.detach(), early, rows, late


def random_numbers(model: Any, optimizer: Any, x: Tensor) -> Any:
    own = torch.Generator()
    optimizer.zero_grad()
    noise = torch.rand(3, 6)
    hidden = checkpoint(lambda t: F.dropout(t, 0.5), model(x), use_reentrant=False)
    loss = (hidden * noise + torch.randn(3, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), torch.rand(2), own is None


@pytest.mark.parametrize("body", [in_place, random_numbers])
def test_every_order_gives_the_bits_of_the_plain_step(body: Any) -> None:
    for seed in range(4):
        job, plain = job_of(body), job_of(body)
        state = torch.get_rng_state()
        found = operators(job.program())
        torch.set_rng_state(state)
        plain.step(*plain.batches[1])
        order = random_order(found.graph, seed)
        assert order != list(range(len(order)))
        for batch in job.batches[2:]:
            state = torch.get_rng_state()
            expected = plain.step(*batch)
            torch.set_rng_state(state)
            got = run(found, order, batch)
            for one, two in zip(got, expected, strict=True):
                assert one is two or torch.equal(one, two)
            same(job, plain)


def same(one: Job, two: Job) -> None:
    for left, right in zip(one.everything(), two.everything(), strict=True):
        assert torch.equal(left, right)


def row_of(found: Operators, name: str, nth: int = 0) -> int:
    rows = [row for row, text in enumerate(found.graph.name) if text.startswith(name)]
    return rows[nth]


def ancestors(found: Operators, row: int) -> set[int]:
    seen: set[int] = set()
    waiting = [row]
    while waiting:
        for before in found.graph.before_of(waiting.pop()).tolist():
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    return seen


def test_a_write_waits_for_what_reads_before_it_through_any_view() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        table = torch.zeros(4, 4)
        read = table[0].exp()
        table.t().fill_(2.0)
        again = table.view(16).sin()
        model(x).sum().backward()
        return read, again

    found = operators(job_of(body).program())
    exp, fill, sin = (row_of(found, f"aten.{name}.") for name in ("exp", "fill_", "sin"))
    assert exp in found.graph.before_of(fill)
    assert fill in found.graph.before_of(sin)
    assert exp not in found.graph.before_of(sin)


def test_a_norm_over_all_gradients_is_a_barrier() -> None:
    job = residual_job()

    def step(x: Tensor, y: Tensor) -> None:
        job.optimizer.zero_grad()
        F.cross_entropy(job.model(x), y).backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()

    job.step = step
    found = operators(job.program())
    norms = {row for row, name in enumerate(found.graph.name) if "_foreach_norm" in name}
    assert len(norms) == len(list(job.model.parameters()))
    for row, node in enumerate(found.nodes):
        if facts_of(node).update and "addcdiv_" in str(node.target):
            assert norms <= ancestors(found, row)


def test_updates_are_free_to_run_early() -> None:
    found = operators(residual_job().program())
    last = row_of(found, "aten.convolution_backward", -1)
    updates = [row for row, node in enumerate(found.nodes) if facts_of(node).update]
    assert any(last not in ancestors(found, row) for row in updates)


def test_a_gradient_from_before_is_freed_where_the_step_makes_another() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        old = [p.grad.sum() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        model(x).sum().backward()
        return old

    job = job_of(body)
    program = job.program()
    assert [place.path for place in program.frees] == ["model.weight.grad", "model.bias.grad"]
    graph = operators(program).graph
    old = [v for v in range(graph.values) if graph.maker[v] < 0]
    assert sorted(graph.bytes[old].tolist()) == [6 * 4, 36 * 4]
    assert not graph.lasts[old].any()
    job.optimizer.zero_grad(set_to_none=False)


def test_the_schedule_has_every_node_once_and_in_an_order_that_runs() -> None:
    found = operators(residual_job(torch.optim.AdamW, foreach=True).program())
    for seed in range(3):
        nodes = found.schedule(random_order(found.graph, seed))
        every = found.program.graph_module.graph.nodes
        assert set(nodes) == {n for n in every if n.op not in ("placeholder", "output")}
        place = {node: number for number, node in enumerate(nodes)}
        assert len(place) == len(nodes)
        for node in nodes:
            assert all(place[used] < place[node] for used in node.all_input_nodes if used in place)
