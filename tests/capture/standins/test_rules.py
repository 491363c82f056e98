"""`memplan.register_rule`: what a rule makes is what the trace shows, under its name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.standins import registry
from memplan.capture.standins.rules import Call
from memplan.types.errors import CaptureError, UsageError
from memplan.types.trace import EventKind, EventView, Provenance, Trace
from tests.capture.jobs import record


@pytest.fixture(autouse=True)
def rules_forgotten() -> Iterator[None]:
    before = dict(registry._rules)
    yield
    for name in set(registry._rules) - set(before):
        registry.forget_rule(name)


def by_rule(trace: Trace, name: str, kind: EventKind = EventKind.ALLOC) -> list[EventView]:
    return [event for event in trace if event.kind == kind and event.op == name]


def sizes(trace: Trace, name: str) -> list[int]:
    return [event.bytes for event in by_rule(trace, name)]


def attention_rule() -> None:
    @memplan.register_rule("my_extension.attention", source="my_extension 1.2, attention.cu")
    def attention(call: Call, q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> Any:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        call.workspace(4096, low=0, high=8192)
        call.save(q, k, out, lse)
        return out

    @attention.backward
    def _(call: Call, gradient: torch.Tensor) -> Any:
        q, k, _, _ = call.saved
        call.workspace(1 << 20)
        return torch.empty_like(q), torch.empty_like(k)


def attend() -> None:
    import my_extension  # type: ignore[import-not-found]

    q = nn.Parameter(torch.empty(8, 64, device="cuda"))
    k = torch.empty(16, 64, device="cuda")
    my_extension.attention(q, k, causal=True).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_a_function_of_an_absent_package_takes_what_its_rule_makes() -> None:
    attention_rule()
    trace = record(attend)
    # out, lse, workspace; then in the backward pass the workspace and two gradients
    assert sizes(trace, "my_extension.attention") == [2048, 32, 4096, 1 << 20, 2048, 4096]
    events = by_rule(trace, "my_extension.attention")
    assert {event.provenance for event in events} == {Provenance.RULE}
    workspace = events[2].index
    assert trace.events.bytes_low[workspace] == 0
    assert trace.events.bytes_high[workspace] == 8192
    freed = {event.storage: event.index for event in trace if event.kind == EventKind.FREE}
    assert freed[events[2].storage] < events[3].index  # the workspace ends with the call
    assert events[1].index < freed[events[1].storage]
    assert freed[events[1].storage] > events[3].index  # what is saved does not
    assert {event.source for event in events} == {events[0].source}
    assert events[0].source.startswith("tests/capture/standins/test_rules.py:")
    choice = next(c for c in trace.meta.kernels if c.op == "my_extension.attention")
    assert (choice.kernel, choice.reason) == ("rule", "my_extension 1.2, attention.cu")


def test_a_rule_without_a_backward_says_so() -> None:
    @memplan.register_rule("my_extension.attention")
    def attention(call: Call, q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> Any:
        return torch.empty_like(q)

    with pytest.raises(CaptureError) as caught:
        record(attend)
    assert "the backward pass of my_extension.attention" in caught.value.message
    assert "test_rules.py:" in caught.value.message
    assert "backward" in caught.value.hint


def test_a_name_without_a_rule_ends_the_capture_where_it_is_used() -> None:
    attention_rule()

    def job() -> None:
        from my_extension import other

        other(torch.empty(4, device="cuda"))

    with pytest.raises(CaptureError) as caught:
        record(job)
    assert "my_extension.other cannot be captured" in caught.value.message
    assert "test_rules.py:" in caught.value.message
    assert "memplan.register_rule" in caught.value.hint


def test_an_operator_that_is_not_here_is_answered_by_its_rule() -> None:
    @memplan.register_rule("my_operators::double")
    def double(call: Call, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(2 * x.numel())

    def job() -> None:
        x = torch.empty(8, device="cuda")
        assert torch.ops.my_operators.double(x).shape == (16,)
        assert torch.ops.my_operators.double.default(x).shape == (16,)

    assert sizes(record(job), "my_operators::double") == [64, 64]
    with pytest.raises(AttributeError):
        torch.ops.my_operators.double.default  # noqa: B018


def test_an_operator_without_a_shape_rule_is_answered_by_its_rule() -> None:
    library = torch.library.Library("my_library", "FRAGMENT")
    library.define("scale(Tensor x, float by) -> Tensor")
    library.define("shaped(Tensor x) -> Tensor")
    try:

        @memplan.register_rule("my_library::scale")
        def scale(call: Call, x: torch.Tensor, by: float) -> torch.Tensor:
            call.workspace(2 * x.numel())
            return torch.empty_like(x)

        def job() -> None:
            x = torch.empty(8, device="cuda")
            torch.ops.my_library.scale(x, 2.0)

        assert sizes(record(job), "my_library::scale") == [16, 32]

        def unknown() -> None:
            torch.ops.my_library.shaped(torch.empty(8, device="cuda"))

        with pytest.raises(CaptureError, match=r"my_library.shaped") as caught:
            record(unknown)
        assert "memplan.register_rule" in caught.value.hint
    finally:
        library._destroy()


def test_an_operator_can_be_differentiated_by_its_rule() -> None:
    library = torch.library.Library("my_library", "FRAGMENT")
    library.define("square(Tensor x) -> Tensor")
    try:

        @memplan.register_rule("my_library::square")
        def square(call: Call, x: torch.Tensor) -> torch.Tensor:
            call.save(x)
            return torch.empty_like(x)

        @square.backward
        def _(call: Call, gradient: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(call.saved[0])

        def job() -> None:
            x = nn.Parameter(torch.empty(8, device="cuda"))
            torch.ops.my_library.square(x).sum().backward()
            assert x.grad is not None

        assert sizes(record(job), "my_library::square") == [32, 32]
    finally:
        library._destroy()


def test_too_few_gradients_are_an_error() -> None:
    attention_rule()
    registry._rules["my_extension.attention"].of_backward = lambda call, gradient: gradient
    with pytest.raises(CaptureError, match="1 gradients for 2 tensors"):
        record(attend)


@pytest.mark.parametrize("name", ["attention", "a::b::c", "my extension.f", ""])
def test_a_name_must_be_one_of_an_operator_or_a_function(name: str) -> None:
    with pytest.raises(UsageError, match="names neither"):
        memplan.register_rule(name, lambda call: None)


def test_a_workspace_has_its_size_between_its_bounds() -> None:
    with pytest.raises(ValueError, match="between"):
        Call().workspace(10, low=20)


def test_the_example_from_the_command_line() -> None:
    folder = Path(__file__).parents[3] / "examples" / "own_kernels"
    command = ["estimate", "--json", "--steps", "1", "--with", str(folder / "rules.py")]
    done = subprocess.run(
        [sys.executable, "-m", "memplan", *command, str(folder / "pretrain.py"), "--width", "64"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {item["reason"] for item in answer["kernels"]} == {"fused_mlp 0.3, csrc/forward.cu"}
    assert answer["low_bytes"] < answer["peak_bytes"] < answer["high_bytes"]
