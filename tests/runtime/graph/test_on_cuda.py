"""Graphs of a card, on fake tensors: what kernels and the allocator add."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import memplan
from bench.order_jobs.graph import graph_of
from memplan.capturing.cuda.device import fake_cuda_device
from memplan.capturing.kernels import rnn
from memplan.capturing.kernels.convolution import Convolution, ConvSettings, Direction
from memplan.capturing.kernels.convolution import conv_workspace as workspace
from memplan.capturing.kernels.workspaces import cublas_workspace_bytes
from memplan.capturing.operators.call_memory import CallMemory, CallRules
from memplan.order.allocated import allocated_peak
from memplan.order.evaluate import peak, program_order
from memplan.phases.step_graph import plain_peak
from memplan.runtime.card import profile_of
from memplan.runtime.graph import inductor_buffers
from memplan.runtime.graph.fused import CallerMemory, PartInterface
from memplan.runtime.graph.inductor import CompiledKernels
from memplan.runtime.graph.inductor_buffers import InputBuffer, UnknownSizeError
from memplan.runtime.graph.operator_graph import OperatorGraph
from memplan.runtime.graph.ordering import choose_order
from memplan.runtime.graph.program import facts_of, program_of
from memplan.runtime.graph.recompute_problem import recompute_problem
from memplan.types.device import DEFAULT_PROFILE, find_profile

aten = torch.ops.aten
CARD = find_profile(DEFAULT_PROFILE)
SETTINGS = ConvSettings(CARD.capability, allow_tf32=torch.backends.cudnn.allow_tf32)
X, W, Y = (32, 64, 64, 64), (16, 64, 3, 3), (32, 16, 64, 64)
CONVOLUTION = Convolution(X, W, Y, "float32", (1, 1), (1, 1), (1, 1))
CUBLAS = cublas_workspace_bytes(CARD.capability, os.environ)


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_cuda_device(), FakeTensorMode():
        yield
    torch._dynamo.reset()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(W, device="cuda"))
        self.last = nn.Parameter(torch.empty(10, 16, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.conv2d(x, self.weight, padding=1).relu()
        return torch.as_tensor(y.mean((2, 3)) @ self.last.t())


@pytest.fixture
def found() -> OperatorGraph:
    """A whole step."""
    net = Network()
    x = torch.empty(X, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    step = memplan.compile(lambda: net(x).square().mean(), optimizer=optimizer)
    return graph_of(step)


def memory(found: OperatorGraph, target: Any) -> CallMemory:
    (node,) = [node for node in found.nodes if node.target is target]
    return facts_of(node).memory


def test_a_convolution_asks_for_what_the_rules_of_captures_say(found: OperatorGraph) -> None:
    one = workspace(CONVOLUTION, Direction.FORWARD, SETTINGS)
    assert memory(found, aten.convolution.default) == CallMemory(one.bytes, one.high)
    assert 0 < one.bytes < one.high
    back = workspace(CONVOLUTION, Direction.BACKWARD_FILTER, SETTINGS)
    assert memory(found, aten.convolution_backward.default) == CallMemory(back.bytes, back.high)


def test_workspaces_that_stay_are_there_all_the_time(found: OperatorGraph) -> None:
    program = found.program
    assert list(program.workspaces) == [CUBLAS, CUBLAS]
    weights = sum(4 * one.numel() for one in Network().parameters())
    state = sum(program.held)
    assert state == weights
    assert found.graph.base_bytes == sum(found.held) == 2 * CUBLAS + weights + state + 4 * _count(X)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def test_a_promise_is_of_whole_blocks(found: OperatorGraph) -> None:
    report = choose_order(found, search=False, deadline_seconds=1.0, seed=0).report
    graph = found.graph
    order = program_order(graph)
    blocks = allocated_peak(graph, order, found.held)
    assert report.ordered_peak_bytes == report.plain_peak_bytes == blocks
    high = replace(graph, scratch=found.scratch_high)
    assert report.high_peak_bytes - blocks == peak(high, order) - peak(graph, order) > 0
    assert blocks > peak(graph, order) > peak(replace(graph, scratch=0 * graph.scratch), order)


def test_recomputation_plans_with_what_kernels_take(found: OperatorGraph) -> None:
    graph = recompute_problem(found).graph
    graph.check()
    assert plain_peak(graph) == peak(found.graph, program_order(found.graph))


def test_what_runs_again_with_its_random_numbers_is_looked_into() -> None:
    from torch._prims.rng_prims import run_and_save_rng_state

    from memplan.runtime.graph.scratch import call_memory

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4096, 64, device="cuda")
    plain = graph.call_function(aten.multinomial.default, (x, 1))
    wrapped = graph.call_function(run_and_save_rng_state, (aten.multinomial.default, x, 1))
    assert call_memory(wrapped) == call_memory(plain) == CallMemory(1 << 20, 1 << 20)


def test_cudnns_recurrent_cells_keep_a_reserve() -> None:
    cells = rnn.Rnn("LSTM", 32, 64, layers=1, steps=7, batch=8)
    graph = torch.fx.Graph()
    shapes = [(7, 8, 32), (256, 32), (256, 64), (256,), (256,), (1, 8, 64)]
    places = [graph.placeholder(f"p{number}") for number in range(len(shapes))]
    for place, shape in zip(places, shapes, strict=True):
        place.meta["val"] = torch.empty(shape, device="cuda")
    x, *weights, state = places
    sizes: tuple[Any, ...] = (2, 64, 0, 1, False, 0.0, True, False, [], None)
    call = graph.call_function(aten._cudnn_rnn.default, (x, weights, 4, None, state, state, *sizes))
    sizes_of = [(7, 8, 64), (1, 8, 64), (1, 8, 64), (0,), (0,)]
    call.meta["val"] = tuple(torch.empty(shape, device="cuda") for shape in sizes_of)
    elements = [graph.call_function(operator.getitem, (call, place)) for place in (0, 3)]
    for element, number in zip(elements, (0, 3), strict=True):
        element.meta["val"] = call.meta["val"][number]
    graph.output(tuple(elements))
    program = program_of(torch.fx.GraphModule(nn.Module(), graph))
    reserve, scratch = rnn.reserve(cells), rnn.workspace(cells)
    assert reserve.high in [one.bytes for one in program.storages]
    assert facts_of(call).memory == CallMemory(scratch.bytes, scratch.high)


def test_the_host_has_none_of_it() -> None:
    rules = CallRules(CARD)
    x, w = torch.empty(X), torch.empty(W)
    given = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert rules(aten.convolution.default, given, {}, torch.empty(Y)) == CallMemory()
    assert profile_of(torch.device("cpu")).name == profile_of(None).name == DEFAULT_PROFILE


# In Inductor's code


def extern(stride: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """A convolution as Inductor's scheduler has it, its operands laid out like that."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.empty(X, device="cuda"), torch.empty(W, device="cuda")
    given = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    origin = graph.call_function(aten.convolution.default, given)
    origin.meta["val"] = torch.empty(Y, device="cuda")
    inputs = [
        SimpleNamespace(get_size=lambda s=shape: s, get_stride=lambda s=shape: stride(s))
        for shape in (X, W)
    ]
    call = SimpleNamespace(
        get_origin_node=lambda: None,
        get_origins=lambda: [x, origin],
        inputs=inputs,
        op_overload=aten.convolution.default,
    )
    return SimpleNamespace(
        node=call, is_extern=lambda: True, get_device=lambda: torch.device("cuda", 0)
    )


def in_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=torch.channels_last).stride()


def test_an_operator_in_inductors_code_asks_for_it_too() -> None:
    one = workspace(CONVOLUTION, Direction.FORWARD, SETTINGS)
    assert inductor_buffers._memory(extern(in_rows)) == CallMemory(one.bytes, one.high)
    last = workspace(replace(CONVOLUTION, channels_last=True), Direction.FORWARD, SETTINGS)
    assert inductor_buffers._memory(extern(channels_last)) == CallMemory(last.bytes, last.high)
    assert last.bytes < one.bytes


def test_sizes_that_may_change_are_not_known() -> None:
    tensor: Any = SimpleNamespace(shape=(ShapeEnv().create_unbacked_symint(), 3))
    with pytest.raises(UnknownSizeError):
        inductor_buffers._laid_out([], [tensor])


def test_workspaces_count_in_forward_and_backward() -> None:
    part = PartInterface.__new__(PartInterface)
    part.inputs, part.layouts = [InputBuffer("w", 100, True)], [None]
    part.outputs, part.returned = ["saved"], [None]
    memory = CallerMemory(0, [1000], 0)
    forward = CompiledKernels(300, [InputBuffer("saved", 50, False)], [None], workspace_bytes=7)
    assert memory.resident(part.inputs) == [1000]
    assert memory.peak(part, part.inputs, forward, backward=False) == 1000 + 7 + 300
    backward = CompiledKernels(200, [], [], workspace_bytes=5)
    saved: list[InputBuffer | None] = [InputBuffer("saved", 50, False)]
    assert memory.resident(saved) == [1000, 100]
    assert memory.peak(part, saved, backward, backward=True) == 1000 + 7 + 200 + 100
