"""Sparse gradients and matrices, against real runs on the CPU and by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError
from memplan.types.trace import EventKind, Phase, Trace
from tests.capturing.jobs import record, sizes

ROWS, WIDTH, IDS = 500, 16, 300
SMALL = 64
"""Scalars: the profiler does not see some of the engine's own."""


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True, **options)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).square().mean()


class Twice(Words):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + super().forward(ids.flip(0)[:100])


class Bags(Words):
    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode=mode)  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.view(30, 10))


def ids() -> torch.Tensor:
    return torch.randint(0, ROWS, (IDS,), generator=torch.Generator().manual_seed(1))


def real(run: Callable[[], object]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = prof.profiler.kineto_results.events()
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return [event.nbytes() for event in memory if event.nbytes() > SMALL]


def captured(job: Callable[[Callable[[Callable[[], object]], None]], object]) -> list[int]:
    options = CaptureOptions(profile=find_profile("a100-80gb"))
    asked: list[int] = []
    with CaptureSession(options, method="fake-cpu") as session:
        builder = session.state.recorder.builder
        spans: list[tuple[int, int]] = []

        def measure(run: Callable[[], object]) -> None:
            begin = len(builder)
            run()
            spans.append((begin, len(builder)))

        job(measure)
        events = session.trace().events
    for begin, end in spans:
        rows = [i for i in range(begin, end) if events.kind[i] == EventKind.ALLOC]
        asked += [int(events.bytes[i]) for i in rows if events.bytes[i] > SMALL]
    return asked


def assert_same_sizes(job: Callable[[Callable[[Callable[[], object]], None]], object]) -> None:
    asked: list[int] = []
    job(lambda run: asked.extend(real(run)))
    assert captured(job) == asked


@pytest.mark.parametrize(
    "make", [Words, lambda: Words(padding_idx=0), Twice], ids=["once", "padding", "twice"]
)
def test_a_backward_pass_asks_for_what_a_real_one_does(make: Callable[[], nn.Module]) -> None:
    def job(measure: Callable[[Callable[[], object]], None]) -> None:
        model = make()
        known = ids() + torch.zeros_like(model.out.weight[0, :1], dtype=torch.int64)  # type: ignore[union-attr, index]
        measure(lambda: model(known).backward())

    assert_same_sizes(job)


@pytest.mark.parametrize("optimizer", ["SparseAdam", "Adagrad", "SGD"])
def test_an_update_asks_for_what_a_real_one_does(optimizer: str) -> None:
    """With a gradient whose rows are already added up: that alone differs on the CPU."""

    def job(measure: Callable[[Callable[[], object]], None]) -> None:
        model = Words()
        optim = getattr(torch.optim, optimizer)(model.table.parameters(), lr=0.1)
        for _ in range(2):
            model(ids()).backward()
            weight = model.table.weight
            assert weight.grad is not None
            weight.grad = weight.grad.coalesce()
            assert weight.grad._nnz() == len(ids().unique())
            measure(optim.step)
            optim.zero_grad()

    assert_same_sizes(job)


def test_the_rows_of_a_gradient_are_added_up_as_on_a_gpu() -> None:
    """Indices sorted beside their order and the places of the first of each, then the sums."""
    unique = len(ids().unique())

    def job() -> None:
        Bags().cuda()(ids().cuda()).backward()

    def coalesced() -> None:
        model = Bags().cuda()
        model(ids().cuda()).backward()
        assert model.table.weight.grad is not None
        gradient = model.table.weight.grad.coalesce()
        assert gradient.values().shape == (unique, WIDTH)
        assert gradient.indices().shape == (1, unique)

    before, after = (sizes(record(one)) for one in (job, coalesced))
    index = 8 * IDS
    assert after == [*before, index, index, index, 2 * index, 4 * unique * WIDTH]


def test_the_mean_of_a_bag_is_divided_again() -> None:
    """The gradient of each index, by the size of its bag."""

    def job(mode: str) -> Trace:
        return record(lambda: Bags(mode).cuda()(ids().cuda()).backward())

    more = Counter(sizes(job("mean"), Phase.BACKWARD)) - Counter(sizes(job("sum"), Phase.BACKWARD))
    bags = 4 * IDS // 10
    assert sorted(more.elements()) == [bags, bags, 4 * IDS]


def test_a_norm_adds_up_equal_indices() -> None:
    """As `test_the_rows_of_a_gradient_are_added_up_as_on_a_gpu`."""
    zeros = torch.zeros(1, 100, dtype=torch.int64)
    assert torch.sparse_coo_tensor(zeros, torch.ones(100), (2,)).norm() == 100

    def job() -> None:
        torch.sparse_coo_tensor(zeros, torch.ones(100), (2,)).cuda().norm()

    index = 8 * 100
    assert sizes(record(job)) == [400, index, index, index, index, 2 * index, 4, 4]


def test_indices_that_are_not_known_are_all_different() -> None:
    def job() -> None:
        model = Words().cuda()
        model(torch.empty(ROWS, 64, device="cuda").sum(1).long()).backward()
        assert model.table.weight.grad is not None
        assert model.table.weight.grad.coalesce()._nnz() == ROWS

    assert any("are all different" in one.text for one in record(job).meta.assumptions)


def test_a_graph_convolution() -> None:
    """A sparse matrix of the host is copied in its two parts; a product asks for compressed rows
    and a copy of its result; the backward pass sorts the transposed matrix."""
    nodes, width = 100, 8
    matrix = torch.eye(nodes).to_sparse()
    index, values, result = 8 * nodes, 4 * nodes, 4 * nodes * width

    def job() -> None:
        adjacency = matrix.cuda()
        features = torch.ones(nodes, width, device="cuda", requires_grad=True)
        torch.spmm(adjacency, features).sum().backward()
        assert features.grad is not None
        assert features.grad.shape == features.shape

    product = [result, 4 * (nodes + 1), 4 * nodes, 4 * nodes, result]
    assert (
        sizes(record(job))
        == [
            *(values, index * 2, result),  # the matrix, the features
            *product,
            *(4, 4),  # the loss and its gradient, which is expanded
            *(index * 2, values, result),  # the matrix transposed, the features' gradient
            *(index, index, index, 2 * index, values, 2 * index),
            *product[1:],
            result,  # the gradient that was expanded
        ]
    )


def test_what_has_no_rule_is_refused() -> None:
    def job() -> None:
        torch.eye(3).to_sparse().cuda().sin()

    with pytest.raises(CaptureError, match=r"aten\.sin\.default has no rule for it"):
        record(job)


def test_a_dense_matrix_becomes_its_nonzero_elements() -> None:
    def job() -> None:
        links = torch.eye(20)
        links[3, 7] = 2
        graph = links.cuda().to_sparse()
        assert graph.is_coalesced() and graph._nnz() == 21
        x = torch.ones(20, 4, device="cuda", requires_grad=True)
        assert torch.sparse.mm(graph, x).shape == (20, 4)
        assert links.cuda().to_sparse(2).to_dense().shape == (20, 20)

    assert 2 * 21 * 8 in sizes(record(job, steps=0))


def test_a_dense_matrix_is_beside_its_coordinates_and_values_twice() -> None:
    cells, most = 300 * 300, 0
    alive: dict[int, int] = {}
    for event in record(lambda: torch.ones(300, 300).cuda().to_sparse(), steps=0):
        if event.kind == EventKind.ALLOC:
            alive[event.storage] = event.bytes
        elif event.kind == EventKind.FREE:
            alive.pop(event.storage, None)
        most = max(most, sum(alive.values()))
    assert most >= (4 + 2 * 16 + 2 * 4) * cells


def test_a_matrix_in_another_layout_is_refused() -> None:
    with pytest.raises(CaptureError, match="sparse_csr"):
        record(lambda: torch.eye(4).cuda().to_sparse_csr(), steps=0)


def test_a_sparse_number_is_refused() -> None:
    with pytest.raises(CaptureError, match="sparse"):
        record(lambda: torch.ones(()).cuda().to_sparse(), steps=0)


def test_a_gradient_of_values_by_way_of_a_matrix_is_refused() -> None:
    def job() -> None:
        places = torch.tensor([[0, 1], [1, 0]], device="cuda")
        weights = torch.ones(2, device="cuda", requires_grad=True)
        matrix = torch.sparse_coo_tensor(places, weights, (2, 2))
        torch.sparse.mm(matrix, torch.ones(2, 4, device="cuda")).sum().backward()

    with pytest.raises(CaptureError, match=r"aten\.sparse_mask\.default has no rule for it"):
        record(job)
