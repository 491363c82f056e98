"""What can be done with `torch.compile` besides compiling a model, and what goes wrong."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch._dynamo.output_graph import OutputGraph
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch.profiler import ProfilerActivity, profile

import memplan
from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.capturing.standins import registry
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Phase, Provenance, Role
from tests.capturing.compiled.test_inductor import ROWS, WIDTH, Mlp, kernels, train
from tests.capturing.distributed.ranks import capture, join
from tests.capturing.jobs import allocations, assumed, bytes_of, operators, record, sizes

_SMALL = 64
"""Scalars: the profiler does not see some of the engine's own."""


class Residual(nn.Module):
    """A tied weight, additions that fan in, and a scalar for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.down(torch.relu(self.up(x))) * x.sigmoid()
        return (x * x).mean()


def real_requests(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[int]:
    """Sizes of all CPU allocations of a forward and backward, as PyTorch reports them."""
    step(x).backward()  # compiles
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step(x).backward()
    events = prof.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in memory if event.nbytes() > _SMALL]


def captured_requests(make: Callable[[], nn.Module], backend: str) -> list[int]:
    options = CaptureOptions(profile=find_profile("a100-80gb"))
    with CaptureSession(options, method="fake-cpu") as session:
        model = make()
        step = torch.compile(model, backend=backend)
        x = nn.Parameter(torch.zeros(ROWS, WIDTH), requires_grad=False)  # fake, on the host too
        step(x).backward()
        start = len(session.state.recorder.builder)
        step(x).backward()
        trace = session.trace()
    return [
        event.bytes
        for event in trace
        if event.index >= start and event.kind == EventKind.ALLOC and event.bytes > _SMALL
    ]


def test_requests_of_aot_eager_are_those_of_a_real_run() -> None:
    model = Residual()
    real = real_requests(torch.compile(model, backend="aot_eager"), torch.zeros(ROWS, WIDTH))
    torch._dynamo.reset()
    assert captured_requests(Residual, "aot_eager") == real
    assert real != real_requests(model, torch.zeros(ROWS, WIDTH))  # another job than eager


def test_backend_eager_is_eager() -> None:
    def job(compiled: bool) -> Callable[[], None]:
        def run() -> None:
            model = Mlp().cuda()
            train(torch.compile(model, backend="eager") if compiled else model, model)

        return run

    assert sizes(record(job(True))) == sizes(record(job(False)))


def in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def by_block(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return nn.Sequential(compiled)


def with_a_break(model: nn.Module) -> nn.Module:
    forward = model.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = forward(x) * 2
        torch._dynamo.graph_break()
        return y.exp() + 1

    model.forward = broken
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


@pytest.mark.parametrize("wrap", [in_place, by_block, with_a_break])
def test_models_are_compiled_however_it_is_asked_for(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    def job() -> None:
        model = Mlp().cuda()
        train(wrap(model), model)

    trace = record(job)
    assert kernels(trace)
    assert operators(trace)["gelu"] == 0
    assert not list(assumed(trace))


def test_a_graph_that_cannot_be_compiled_here_runs_as_eager_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_lowering: GraphLowering) -> None:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(GraphLowering, "codegen", refuse)

    def job(compiled: bool) -> Callable[[], None]:
        def run() -> None:
            model = Mlp().cuda()
            train(torch.compile(model) if compiled else model, model)

        return run

    trace = record(job(True))
    (text,) = assumed(trace)
    assert "could not be compiled here" in text and "no such kernel" in text
    eager = record(job(False))
    assert sizes(trace, Phase.BACKWARD) == sizes(eager, Phase.BACKWARD)
    # what eager keeps is the most that the graph would keep
    stands_in = [e for e in trace if e.provenance == Provenance.ASSUMED]
    assert not any(trace.events.bytes_low[event.index] for event in stands_in)
    made = Counter(event.bytes for event in stands_in if event.kind == EventKind.ALLOC)
    assert made
    assert made <= Counter(sizes(eager, Phase.FORWARD))


def test_a_compiled_optimizer_step_makes_its_state_and_no_temporaries() -> None:
    def job() -> None:
        weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="cuda"))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        step = torch.compile(optimizer.step)
        for _ in range(3):
            weight.grad = torch.empty_like(weight)
            step()

    trace = record(job)
    square = WIDTH * WIDTH * 4
    assert not list(assumed(trace))
    assert bytes_of(trace, Role.OPTIMIZER_STATE) == 2 * square + 4  # and the number of steps
    assert sizes(trace).count(square) == 1 + 3 + 2  # the parameter, its gradients, two moments


def test_an_error_that_the_script_asked_to_suppress_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_call: object) -> None:
        raise RuntimeError("cannot be traced")

    def job() -> None:
        monkeypatch.setattr(OutputGraph, "compile_and_call_fx_graph", refuse)
        model = Mlp().cuda()
        with torch._dynamo.config.patch(suppress_errors=True):
            train(torch.compile(model, backend="eager"), model)

    texts = list(assumed(record(job)))
    assert texts
    assert all("could not be compiled here" in text for text in texts)


def test_a_model_below_ddp_is_compiled_though_its_graph_is_split() -> None:
    def job() -> None:
        join()
        model = nn.Sequential(Mlp(), Mlp()).cuda()
        whole = nn.parallel.DistributedDataParallel(model)
        train(torch.compile(whole, backend="aot_eager"), model)

    trace = capture(job)
    assert not [text for text in assumed(trace) if "could not be compiled" in text]


def test_a_rule_breaks_the_graph() -> None:
    package = types.ModuleType("my_compiled_package")
    package.double = lambda x: torch.ops.no_such.operator(x)  # type: ignore[attr-defined]
    name = "my_compiled_package.double"

    def job() -> None:
        function = torch.compile(lambda x: package.double(x.sin() * 2).cos() * 2, backend="eager")
        function(torch.empty(WIDTH, device="cuda"))

    sys.modules[package.__name__] = package
    try:
        memplan.register_rule(name, lambda call, x: x.new_empty(2 * x.numel()))
        trace = record(job)
    finally:
        registry._rules.pop(name, None)
        del sys.modules[package.__name__]
    assert [e.bytes for e in trace if e.op == name and e.kind == EventKind.ALLOC] == [2 * 4 * WIDTH]


def test_nothing_of_it_stays_in_the_process() -> None:
    from torch._inductor import compile_fx

    watched: list[tuple[object, str]] = [
        (torch, "compile"),
        (nn.Module, "__call__"),
        (GraphLowering, "compile_to_module"),
        (compile_fx, "compile_fx"),
        (compile_fx, "cudagraphify"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    record(lambda: torch.compile(lambda x: x + 1)(torch.ones(4, device="cuda")))
    assert [getattr(owner, name) for owner, name in watched] == before
    assert torch.equal(
        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2)), 1 + torch.ones(2)
    )


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash_attn is installed")
@pytest.mark.parametrize("dynamic", [None, True])
def test_flash_attention_does_not_break_the_graph(dynamic: bool | None) -> None:
    def job() -> None:
        from flash_attn import flash_attn_qkvpacked_func  # type: ignore[import-not-found]

        @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
        def step(qkv: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = flash_attn_qkvpacked_func(qkv, causal=True)
            return made.sum()

        qkv = torch.empty(2, 256, 3, 8, 64, device="cuda", dtype=torch.bfloat16)
        step(qkv.requires_grad_()).backward()

    trace = record(job)
    made = Counter(event.op for event in trace if event.kind == EventKind.ALLOC)
    # output, log-sum-exp and random state; the gradient made contiguous, row sums, dQ in fp32
    assert made["flash_attn::_flash_attn_forward"] == 3
    assert made["flash_attn::_flash_attn_backward"] == 3
    assert not [text for text in assumed(trace) if "compile" in text]


@pytest.mark.parametrize("wrapped", [True, False])
def test_flex_attention_is_compiled(wrapped: bool) -> None:
    rows, features = 256, 16

    def job() -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, rows, rows, device="cuda")
        query = torch.zeros(1, 2, rows, features, device="cuda", requires_grad=True)
        with inductor_config.patch(wrap_inductor_compiled_regions=wrapped):
            torch.compile(flex_attention)(query, query, query, block_mask=mask).sum().backward()

    trace = record(job)
    assert not [text for text in assumed(trace) if "compile" in text]
    names = {trace.strings[number] for number in trace.ops.name}
    assert any(name.startswith("inductor.triton_tem_fused_flex_attention") for name in names)


def test_results_written_to_given_tensors_without_a_shape_rule() -> None:
    """Inductor calls matrix products so; not every one has a rule for `out=`."""

    def job() -> None:
        left, right = (torch.empty(64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in "ab")
        scale = torch.ones((), device="cuda")
        out = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
        given = {"out_dtype": torch.bfloat16, "out": out}
        made = torch.ops.aten._scaled_mm.out(left, right.t(), scale, scale, **given)
        assert made is out

    mine = [event for event in record(job) if event.op == "aten._scaled_mm.out"]
    made = [event.bytes for event in mine if event.kind == EventKind.ALLOC]
    assert made == [8_519_680]  # the workspace of an A100's cuBLAS


@pytest.mark.parametrize("is_compiled", [True, False])
def test_flex_attention_makes_all_scores_only_where_it_is_not_compiled(
    is_compiled: bool,
) -> None:
    rows, features = 256, 16

    def job() -> None:
        from torch.nn.attention.flex_attention import flex_attention

        attention = torch.compile(flex_attention) if is_compiled else flex_attention
        query = torch.zeros(1, 2, rows, features, device="cuda", requires_grad=True)
        attention(query, query, query).sum().backward()

    made = [event.bytes for event in allocations(record(job))]
    assert (2 * rows * rows * 4 in made) is not is_compiled
    assert made.count(2 * rows * features * 4) >= 1 + 1 + 3  # query, output, three gradients
