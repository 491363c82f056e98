"""What Inductor keeps, reuses and never makes, in small cases that can be worked out by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memplan.capturing.compiled import card
from memplan.capturing.cuda.fake_cuda import COMPILED_GRAPHS
from memplan.types.trace import EventKind, Phase, Provenance, Trace
from tests.capturing.jobs import allocations, assumed, frees, operators, record, sizes

FLOAT = 4
ROWS, WIDTH = 64, 256
TENSOR = ROWS * WIDTH * FLOAT


class Mlp(nn.Module):
    """What it saves for its backward pass differs from eager."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def kernels(trace: Trace) -> list[str]:
    """Names of the generated kernels, in order."""
    names = (trace.strings[number] for number in trace.ops.name)
    return [name for name in names if name.startswith("inductor.triton")]


def square() -> torch.Tensor:
    return torch.ones(WIDTH, WIDTH, device="cuda")


def train(step: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = step(torch.ones(ROWS, WIDTH, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def kept_for_backward(trace: Trace, least: int = TENSOR) -> list[int]:
    """Sizes that the forward pass of the second step leaves to its backward pass."""
    ends = frees(trace)
    rows = [event for event in trace if event.step == 1]
    backward = next(event.index for event in rows if event.phase == Phase.BACKWARD)
    return sorted(
        event.bytes
        for event in allocations(trace, Phase.FORWARD)
        if event.step == 1
        and event.bytes >= least
        and event.index < backward < ends.get(event.storage, len(trace))
    )


def test_a_chain_of_pointwise_operators_is_one_kernel_and_one_buffer() -> None:
    kept: list[torch.Tensor] = []

    def job() -> None:
        chain = torch.compile(lambda x: (x * 2).sin().exp() + x)
        kept.append(chain(square()))

    trace = record(job)
    assert sizes(trace) == [WIDTH * WIDTH * FLOAT] * 2  # the input and the result
    assert len(kernels(trace)) == 1


def test_an_activation_takes_the_place_of_its_input() -> None:
    kept: list[torch.Tensor] = []

    def job() -> None:
        x, w = square(), square()
        kept.append(torch.compile(lambda x, w: torch.relu(x @ w) * 3)(x, w))

    trace = record(job)
    assert sizes(trace) == [WIDTH * WIDTH * FLOAT] * 3  # the product's buffer is the result's


def test_a_buffer_is_reused_once_its_last_reader_is_done() -> None:
    kept: list[torch.Tensor] = []

    def job() -> None:
        x, w = square(), square()
        kept.append(torch.compile(lambda x, w: ((x @ w) @ w) @ w)(x, w))

    trace = record(job)
    assert sizes(trace) == [WIDTH * WIDTH * FLOAT] * 4  # the third product is where the first was
    assert operators(trace)["mm"] == 3


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).sin().exp().mean(0)


def test_cheap_operators_are_computed_again_in_the_backward_pass() -> None:
    def job(compiled: bool) -> Callable[[], None]:
        def run() -> None:
            model = Chain().cuda()
            train(torch.compile(model) if compiled else model, model)

        return run

    # The input for the weight's gradient, the product for the sine's; eager keeps the result of
    # the exponential too.
    trace = record(job(True))
    assert kept_for_backward(trace) == [TENSOR, TENSOR]
    assert kept_for_backward(record(job(False))) == [TENSOR, TENSOR, TENSOR]
    assert not list(assumed(trace))


def test_a_scan_over_a_long_row_is_compiled_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the documents' numbers in a mask; its blocks tell each other through a workspace."""
    monkeypatch.setitem(sys.modules, "triton.language", None)

    def job() -> None:
        kept = torch.compile(lambda x: x.cumsum(0) * 2)(torch.ones(1 << 16, device="cuda"))
        del kept

    trace = record(job)
    assert not list(assumed(trace))
    blocks = (1 << 16) // 256
    assert sizes(trace)[1:] == [FLOAT << 16, 8 * blocks]
    assert sys.modules["triton.language"] is None
    assert not any(hasattr(module, "__spec__") for module in card._LANGUAGE.values())


def test_cuda_graphs_live_in_a_pool_of_their_own() -> None:
    def job() -> None:
        model = Mlp().cuda()
        train(torch.compile(model, mode="reduce-overhead"), model)

    trace = record(job)
    pool = [event for event in allocations(trace) if event.stream == COMPILED_GRAPHS]
    steps = [[event.bytes for event in pool if event.step == step] for step in range(3)]
    # From the recording on, the input and the result's gradient are copied to fixed addresses;
    # parameters are at theirs, and what the forward pass saved is in the pool.
    assert sorted(steps[1]) == sorted([*steps[0], TENSOR, TENSOR])
    assert steps[2] == steps[1]
    assert any("CUDA graphs" in text for text in assumed(trace))
    assert all(event.phase != Phase.OPTIMIZER for event in pool)


def test_the_backend_of_cuda_graphs_alone_is_eager_in_a_pool() -> None:
    def job() -> None:
        model = Chain().cuda()
        train(torch.compile(model, backend="cudagraphs"), model)

    trace = record(job)
    assert not kernels(trace)
    pool = [event for event in allocations(trace) if event.stream == COMPILED_GRAPHS]
    assert {event.op for event in pool} >= {"aten.mm.default", "aten.sin.default"}
    assert all("could not be compiled" not in text for text in assumed(trace))


def test_settings_of_the_script_do_not_make_it_time_kernels() -> None:
    asked = {"coordinate_descent_tuning": True, "max_autotune": True, "fx_graph_cache": False}

    def job() -> None:
        with torch._inductor.config.patch(asked):
            torch.compile(lambda x: torch.relu(x @ x))(square())

    trace = record(job)
    assert kernels(trace)
    assert not list(assumed(trace))
    timed = next(e for e in trace if e.kind == EventKind.ALLOC and "autotune" in e.op)
    assert timed.bytes == (40 << 20) + 3 * WIDTH * WIDTH * FLOAT  # with the product


def test_timing_takes_memory_once_and_by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak_of(mode: str) -> tuple[int, int, int]:
        def job() -> None:
            function = torch.compile(lambda x: torch.relu(x @ x), mode=mode)
            for _ in range(3):
                function(square())

        trace = record(job)
        (event,) = (
            event for event in trace if event.kind == EventKind.ALLOC and "autotune" in event.op
        )
        assert event.provenance == Provenance.RULE
        row = event.index
        low, high = trace.events.bytes_low[row], trace.events.bytes_high[row]
        return int(low), event.bytes, int(high)

    l2 = 40 << 20  # of an A100
    assert peak_of("default") == (0, l2, 2 * l2)
    timed = l2 + 3 * WIDTH * WIDTH * FLOAT
    assert peak_of("max-autotune-no-cudagraphs") == (0, timed, 2 * timed)


def test_a_buffer_names_its_operator_its_module_and_its_line() -> None:
    """In the forward and in the backward pass, and not the function that generated code calls."""
    model_line = Mlp.forward.__code__.co_firstlineno + 1

    def job() -> None:
        model = nn.Sequential(Mlp(), Mlp()).cuda()
        train(torch.compile(model), model)

    trace = record(job)
    place = f"test_inductor.py:{model_line}"
    made = [
        (event.phase, event.op.removeprefix("inductor.buffer."), event.module)
        for event in allocations(trace)
        if event.op.startswith("inductor.buffer.") and event.source.endswith(place)
    ]
    for layer in "01":
        assert (Phase.FORWARD, "addmm", f"Sequential.{layer}.up") in made
        assert any(
            phase == Phase.BACKWARD and op == "mm" and module == f"Sequential.{layer}.up"
            for phase, op, module in made
        )
    assert not allocations(trace, Phase.FORWARD, op="empty_strided")
