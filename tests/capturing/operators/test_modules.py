"""Modules: where their weights are, what moving them costs, what recurrent stacks take."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from memplan.capturing.kernels import rnn
from memplan.types.trace import EventKind, Phase, Provenance, Role
from tests.capturing.jobs import allocations, bytes_of, frees, operators, record, sizes

WIDTH = 64
WEIGHT = 4 * WIDTH * WIDTH


def trained(model: nn.Module, x: Callable[[], torch.Tensor], rounds: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(rounds):
        out = model(x())
        (out[0] if isinstance(out, tuple) else out).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# Weights


def test_a_model_built_on_the_host_costs_the_device_when_it_moves() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        assert model.weight.device.type == "cpu"
        nn.init.trunc_normal_(model.weight)
        nn.init.orthogonal_(model.weight)
        model.to("cuda:0")
        model.to(0)
        model.cuda()

    assert sizes(record(job)) == [WEIGHT]


def test_half_replaces_weights_one_by_one() -> None:
    trace = record(lambda: nn.Linear(WIDTH, WIDTH, bias=False).cuda().half().bfloat16().float())
    assert sizes(trace) == [WEIGHT, WEIGHT // 2, WEIGHT // 2, WEIGHT]
    ends = frees(trace)
    assert [event.storage in ends for event in allocations(trace)[:3]] == [True] * 3


def test_tied_weights_stay_tied_and_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, WIDTH)
            self.head = nn.Linear(WIDTH, 50, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids) * self.scale)

    def job() -> None:
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.cuda()
        assert model.head.weight is model.embedding.weight
        model(torch.randint(0, 50, (4, 8), device="cuda")).mean().backward()
        optimizer.step()

    trace = record(job)
    assert bytes_of(trace, Role.PARAMETER) == 4 * 50 * WIDTH + 4 * WIDTH


def test_data_of_a_parameter_can_be_replaced() -> None:
    def job() -> None:
        host = nn.Parameter(torch.zeros(3))
        host.data = torch.ones(WIDTH, WIDTH)
        host.data.normal_()
        assert host.shape == (WIDTH, WIDTH)
        device = nn.Parameter(torch.zeros(3, device="cuda"))
        device.data = torch.ones(WIDTH, WIDTH, device="cuda")
        assert device.device.type == "cuda"
        device.data = torch.ones(2)
        assert device.device.type == "cpu"

    assert sizes(record(job)) == [12, WEIGHT]


def test_a_model_that_goes_to_meta_takes_nothing_until_it_is_filled() -> None:
    """As accelerate prepares a model for FSDP2."""

    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        model.to("meta")
        assert model.weight.is_meta
        other = nn.Linear(WIDTH, WIDTH, bias=False).cuda().to("meta")
        assert torch.cuda.memory_allocated() == 0
        for each in (model, other):
            each.to_empty(device="cuda")
            trained(each, lambda: torch.randn(8, WIDTH, device="cuda"))

    trace = record(job)
    assert bytes_of(trace, Role.PARAMETER) == 3 * WEIGHT  # one of them before it went to meta
    assert sizes(trace, Phase.SETUP)[:2] == [WEIGHT, WEIGHT]


@pytest.mark.parametrize("before", [True, False])
def test_lazy_modules(before: bool) -> None:
    def job() -> None:
        model = nn.Sequential(nn.LazyLinear(WIDTH, bias=False), nn.LazyBatchNorm1d())
        if before:
            model.cuda()
        x = torch.randn(8, WIDTH, device="cuda" if before else "cpu")
        model(x)
        model.cuda()
        assert model[0].weight.shape == (WIDTH, WIDTH)
        trained(model, lambda: torch.randn(8, WIDTH, device="cuda"))

    trace = record(job)
    assert bytes_of(trace, Role.PARAMETER) == WEIGHT + 4 * 4 * WIDTH + 8


def test_a_lazy_module_is_made_where_and_as_which_type_it_was_asked_for() -> None:
    def job() -> None:
        born = nn.LazyLinear(WIDTH, bias=False, device="cuda", dtype=torch.bfloat16)
        copied, moved = deepcopy(born), nn.LazyLinear(WIDTH, bias=False).to("cuda", torch.bfloat16)
        model = nn.Sequential(born, copied, moved)
        trained(model, lambda: torch.randn(8, WIDTH, device="cuda", dtype=torch.bfloat16))

    assert bytes_of(record(job), Role.PARAMETER) == 3 * WEIGHT // 2


def test_a_lazy_module_has_weights_from_its_first_call() -> None:
    trace = record(lambda: nn.LazyLinear(WIDTH, bias=False).cuda()(torch.randn(8, WIDTH).cuda()))
    assert bytes_of(trace, Role.PARAMETER) == WEIGHT


def test_lazy_modules_that_were_made_before_the_capture_or_load_weights() -> None:
    earlier, devices = nn.LazyLinear(WIDTH, bias=False), list[torch.device]()

    def job() -> None:
        devices.append(earlier.weight.data.device)
        loading = nn.LazyLinear(WIDTH, bias=False).cuda()
        loading.load_state_dict(nn.Linear(WIDTH, WIDTH, bias=False).state_dict())
        trained(
            nn.Sequential(earlier.cuda(), loading), lambda: torch.randn(8, WIDTH, device="cuda")
        )

    assert bytes_of(record(job), Role.PARAMETER) == 2 * WEIGHT
    assert devices == [torch.device("cpu")]


def test_default_device_and_device_contexts() -> None:
    def job() -> None:
        torch.set_default_device("cuda")
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        assert torch.tensor([1.0]).is_cuda
        torch.set_default_device(None)
        with torch.device("cuda"):
            nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.device("meta"):
            empty = nn.Linear(WIDTH, WIDTH, bias=False)
        empty.to_empty(device="cuda")
        trained(model, lambda: torch.randn(8, WIDTH, device="cuda"))

    assert sizes(record(job), Phase.SETUP) == [WEIGHT, 4, WEIGHT, WEIGHT, 4 * 8 * WIDTH]


def test_ways_to_put_a_tensor_on_the_device() -> None:
    def job() -> None:
        x = torch.ones(8)
        made = [
            x.cuda(),
            x.cuda(0, non_blocking=True),
            x.to(0),
            x.to("cuda"),
            x.to(torch.device("cuda", 0), torch.half),
            x.pin_memory().to("cuda", non_blocking=True),
            torch.zeros(8, pin_memory=True).cuda(),
            torch.tensor([1.0] * 8, device="cuda"),
            torch.as_tensor([1.0] * 8, device="cuda:0"),
            torch.ones_like(x, device="cuda"),
            torch.empty(8, device="cuda").copy_(x),
        ]
        assert {tensor.device for tensor in made} == {torch.device("cuda", 0)}

    assert sizes(record(job)) == [32, 32, 32, 32, 16, 32, 32, 32, 32, 32, 32]


# Recurrent stacks


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_stacks_run_as_one_kernel(kind: Any, batch_first: bool) -> None:
    def job() -> None:
        model = kind(WIDTH, 32, 2, batch_first=batch_first, bidirectional=True).cuda()
        trained(model, lambda: torch.randn(10, 10, WIDTH, device="cuda"))

    trace = record(job)
    found = operators(trace)
    assert found["_cudnn_rnn"] == found["_cudnn_rnn_backward"] == 2
    assert not any("cell" in op for op in found)
    assert [choice.kernel for choice in trace.meta.kernels if choice.op == "recurrent"] == ["cudnn"]
    mode = {nn.LSTM: "LSTM", nn.GRU: "GRU", nn.RNN: "RNN_TANH"}[kind]
    stack = rnn.Rnn(mode, WIDTH, 32, 2, steps=10, batch=10, bidirectional=True)
    events = trace.events
    reserves = [
        (events.bytes_low[event.index], event.bytes, events.bytes_high[event.index])
        for event in trace
        if event.kind == EventKind.ALLOC
        and event.op == "aten._cudnn_rnn.default"
        and event.provenance == Provenance.RULE
        and trace.storages.role[event.storage] != Role.WORKSPACE
    ]
    expected = rnn.reserve(stack)
    assert reserves == [(expected.low, expected.bytes, expected.high)] * 2
    assert 0 < expected.low < expected.bytes < expected.high
    assert bytes_of(trace, Role.PARAMETER) >= 4 * rnn.weight_count(stack)


def test_weights_of_a_recurrent_stack_become_one_buffer() -> None:
    def job() -> None:
        model = nn.LSTM(WIDTH, 32).cuda()
        storages = {weight.untyped_storage()._cdata for weight in model.parameters()}
        assert len(storages) == 1
        model(torch.randn(5, 2, WIDTH, device="cuda"))[0].sum().backward()
        assert model.weight_ih_l0.grad is not None
        assert model.weight_ih_l0.grad.shape == model.weight_ih_l0.shape

    trace = record(job)
    (buffer,) = allocations(trace, op="flatten_weight")
    assert buffer.bytes == 4 * rnn.weight_count(rnn.Rnn("LSTM", WIDTH, 32, 1, 5, 2))
    ends = frees(trace)
    assert all(event.storage in ends for event in allocations(trace, op="_to_copy"))


def test_evaluation_of_a_recurrent_stack_saves_nothing() -> None:
    def job() -> None:
        model = nn.LSTM(WIDTH, 32).cuda().eval()
        with torch.no_grad():
            out, (hidden, cell) = model(torch.randn(5, 2, WIDTH, device="cuda"))
        assert (out.shape, hidden.shape, cell.shape) == ((5, 2, 32), (1, 2, 32), (1, 2, 32))

    assert sizes(record(job), op="_cudnn_rnn.") == [4 * 5 * 2 * 32, 4 * 2 * 32, 4 * 2 * 32]


def test_packed_sequences_count_their_tokens() -> None:
    def job() -> None:
        model = nn.GRU(WIDTH, 16).cuda()
        x = torch.randn(5, 3, WIDTH, device="cuda", requires_grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]))
        out, _ = model(packed)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(out)
        assert padded.shape == (5, 3, 16)
        assert lengths.tolist() == [5, 3, 2]
        padded.sum().backward()

    trace = record(job)
    assert sizes(trace, op="_cudnn_rnn.")[0] == 4 * 10 * 16


def test_recurrent_stacks_under_autocast() -> None:
    def job() -> None:
        model = nn.LSTM(WIDTH, 32).cuda()
        with torch.autocast("cuda", torch.float16):
            out, _ = model(torch.randn(5, 2, WIDTH, device="cuda"))
        assert out.dtype == torch.float16
        out.float().sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}

    record(job)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_single_cells(cell: Any, bias: bool) -> None:
    def job() -> None:
        out = cell(WIDTH, 16, bias=bias).cuda()(torch.randn(3, WIDTH, device="cuda"))
        state = out[0] if isinstance(out, tuple) else out
        assert state.shape == (3, 16)
        state.sum().backward()

    record(job)
