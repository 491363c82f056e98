"""CUDA graphs and pools that a script makes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memplan.simulate.simulator import simulate
from memplan.timing.step import REPLAYS, step_time
from memplan.types.device import find_profile
from memplan.types.trace import PRIVATE_POOLS, EventKind, Trace
from tests.capturing.jobs import record

MIB = 1 << 20
ROWS, WIDTH = 256, 768
TENSOR, WEIGHT = ROWS * WIDTH * 4, WIDTH * WIDTH * 4


def in_pools(trace: Trace) -> list[int]:
    """Sizes of what is asked of private pools, without workspaces of kernels."""
    return [
        event.bytes
        for event in trace
        if event.kind == EventKind.ALLOC
        and event.stream >= PRIVATE_POOLS
        and event.bytes in (TENSOR, WEIGHT)
    ]


def test_a_replay_takes_what_was_captured() -> None:
    def job(graph: torch.cuda.CUDAGraph | None) -> None:
        model = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(ROWS, WIDTH, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        if graph is not None:
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(6):
            step()

    card = find_profile("rtx4090")
    eager = step_time(record(lambda: job(None)), card)
    replayed = step_time(record(lambda: job(torch.cuda.CUDAGraph())), card)
    assert eager is not None and replayed is not None
    kernels = sum(eager.kernel_seconds.values())
    assert replayed.kernel_seconds == {REPLAYS: pytest.approx(kernels, rel=0.01)}
    assert replayed.seconds == pytest.approx(kernels, rel=0.01)
    assert replayed.host_seconds < eager.host_seconds  # it launches once


def test_a_graph_of_whole_steps_asks_once() -> None:
    replays = 0

    def job() -> None:
        nonlocal replays
        model = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        optimizer = torch.optim.Adam(model.parameters(), capturable=True)
        x = torch.ones(ROWS, WIDTH, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            model(x).sum().backward()
            optimizer.step()
        assert not torch.cuda.is_current_stream_capturing()
        for replays in range(1000):  # noqa: B007
            x.copy_(torch.ones(ROWS, WIDTH))
            graph.replay()

    trace = record(job)
    # output; the gradient of the sum is a view, made contiguous; the weight's gradient, kept
    made = in_pools(trace)
    assert made.count(TENSOR) <= 2
    assert made.count(WEIGHT) >= 1
    assert 1 < replays < 10
    assert trace.meta.optimizer_steps > 4
    last = max(e.index for e in trace if e.stream >= PRIVATE_POOLS and e.kind == EventKind.ALLOC)
    names = [trace.strings[number] for number in trace.ops.name]
    assert names.count("cuda.graph_replay") == replays + 1
    replayed = [e.index for e in trace if e.index > last and e.kind == EventKind.ALLOC]
    assert not [i for i in replayed if trace.events.bytes[i] == WEIGHT]


def test_graphed_callables_run_in_a_pool_and_share_its_memory() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sample = torch.ones(ROWS, WIDTH, device="cuda")
        graphed: Any = torch.cuda.make_graphed_callables(model, (sample,))
        for _ in range(3):
            graphed(torch.ones(ROWS, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job)
    assert in_pools(trace).count(WEIGHT) == 1  # its gradient, for all steps
    assert {e.stream for e in trace if e.stream >= PRIVATE_POOLS} == {PRIVATE_POOLS + 1}
    names = [trace.strings[number] for number in trace.ops.name]
    assert names.count("cuda.graph_replay") == 2 * 3
    assert names.count("cuda.graph_instantiate") == 2


@pytest.mark.parametrize("shared", [True, False])
def test_graphs_share_memory_only_within_a_pool(shared: bool) -> None:
    def job() -> None:
        pool = torch.cuda.graph_pool_handle()
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool if shared else None):
                torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            assert (graph.pool() == pool) is shared

    assert simulate(record(job)).reserved_peak_bytes >= (30 if shared else 60) * MIB
    assert (simulate(record(job)).reserved_peak_bytes < 60 * MIB) is shared


def test_a_pool_keeps_its_memory_when_the_cache_is_emptied() -> None:
    def job() -> None:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")

    timeline = simulate(record(job))
    assert timeline.reserved_peak_bytes == 80 * MIB
    assert int(timeline.reserved[-1]) == 70 * MIB
