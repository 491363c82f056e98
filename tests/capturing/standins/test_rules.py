"""`memplan.register_rule`: what a rule makes is what the trace shows, under its name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.capturing.standins import registry
from memplan.capturing.standins.rules import Call
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError, UsageError
from memplan.types.trace import EventKind, EventView, Provenance, Trace
from tests import warm
from tests.capturing.jobs import record


@pytest.fixture(autouse=True)
def rules_forgotten() -> Iterator[None]:
    before = dict(registry._rules)
    yield
    for name in set(registry._rules) - set(before):
        registry._rules.pop(name, None)


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
    assert events[0].source.startswith("tests/capturing/standins/test_rules.py:")
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


def raises(call: Call, q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> Any:
    width = q.shape[5]
    return q.new_empty(width)


def takes_less(call: Call, q: torch.Tensor) -> Any:
    return torch.empty_like(q)


def on_the_host(call: Call, q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> Any:
    return torch.empty(q.shape)


def saved_on_the_host(call: Call, q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> Any:
    call.save(torch.empty(1 << 20))
    return torch.empty_like(q)


def part_of_a_byte(call: Call, q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> Any:
    call.workspace(q.numel() / 2)  # type: ignore[arg-type]
    return torch.empty_like(q)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (raises, "raised IndexError: tuple index out of range"),
        (takes_less, "does not take what the script passes"),
        (on_the_host, "made a tensor of shape (8, 64) on the cpu"),
        (saved_on_the_host, "made a tensor of shape (1048576,) on the cpu"),
        (part_of_a_byte, "raised TypeError: 'float' object cannot be interpreted as an integer"),
    ],
)
def test_what_is_wrong_in_a_rule_is_said_of_the_rule(rule: Any, said: str) -> None:
    memplan.register_rule("my_extension.attention", rule)
    with pytest.raises(CaptureError) as caught:
        record(attend)
    message, (lines, start) = caught.value.message, inspect.getsourcelines(rule)
    assert "rule for my_extension.attention" in message
    assert said in message
    places = [f"test_rules.py:{line}" for line in range(start, start + len(lines))]
    assert any(place in message for place in places)
    assert message.count("test_rules.py:") == 2  # where it was called, too


def test_what_is_wrong_in_a_backward_rule_is_said_of_it() -> None:
    rule = memplan.register_rule("my_extension.attention", takes_less_of_nothing)
    rule.backward(lambda call, gradient: (gradient.new_empty(3), None))
    with pytest.raises(CaptureError, match=r"made shape \(3,\) .* tensor 0 .* shape \(8, 64\)"):
        record(attend)
    rule.backward(lambda call, gradient: 1 / 0)
    with pytest.raises(CaptureError, match=r"test_rules.py:\d+: the rule .* ZeroDivisionError"):
        record(attend)


def takes_less_of_nothing(call: Call, q: torch.Tensor, k: torch.Tensor, causal: Any) -> Any:
    return torch.empty_like(q)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda x: x.new_empty(3), "shape (3,) of float32, and the operator's shape rule says"),
        (lambda x: x.new_empty(8, dtype=torch.bfloat16), "shape (8,) of bfloat16"),
        (lambda x: None, "returned nothing, and the operator returns Tensor"),
        (lambda x: (x, x), "returned tuple, and the operator returns Tensor"),
    ],
)
def test_a_rule_returns_what_its_operator_returns(made: Any, said: str) -> None:
    library = torch.library.Library("my_library", "FRAGMENT")
    library.define("known(Tensor x) -> Tensor")
    try:
        torch.library.register_fake("my_library::known", torch.empty_like, lib=library)
        memplan.register_rule("my_library::known", lambda call, x: made(x))
        with pytest.raises(CaptureError) as caught:
            record(lambda: torch.ops.my_library.known(torch.empty(8, device="cuda")))
        assert said in caught.value.message
        assert "test_rules.py:" in caught.value.message
    finally:
        library._destroy()


def test_two_rules_for_one_name_are_refused_but_one_may_be_registered_again() -> None:
    for _ in range(2):
        memplan.register_rule("my_extension.attention", raises)
    with pytest.raises(UsageError, match=r"two rules .*test_rules.py:\d+ and .*test_rules.py:\d+"):
        memplan.register_rule("my_extension.attention", takes_less)


def test_an_operator_that_pytorch_does_not_have() -> None:
    with pytest.raises(UsageError, match="no operator aten::_weight_int4_packmm") as caught:
        memplan.register_rule("aten::_weight_int4_packmm", raises)
    assert "aten::_weight_int4pack_mm" in caught.value.hint


@pytest.mark.parametrize("rule", [lambda: None, lambda *, call: None, 3])
def test_a_rule_takes_a_call(rule: Any) -> None:
    with pytest.raises(UsageError, match="not a function that takes a call"):
        memplan.register_rule("my_extension.attention", rule)


def test_a_rule_that_was_never_used_is_said() -> None:
    memplan.register_rule("my_extension.atention", raises)
    notes = record(lambda: torch.empty(8, device="cuda")).meta.notes
    (note,) = (note for note in notes if "my_extension.atention" in note)
    assert "never used" in note


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import memplan\n\n1 / 0\n", r"rules.py:3: .* ZeroDivisionError"),
        ("import memplan\ndef (:\n", r"rules.py:2: .* SyntaxError"),
        ("import memplan\nmemplan.register_rule('x', print)\n", r"rules.py:2: 'x' names neither"),
        ("raise SystemExit(1)\n", r"rules.py:1: .* SystemExit"),
    ],
)
def test_a_file_of_rules_that_fails_names_the_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rules.py"
    file.write_text(text)
    options = CaptureOptions(profile=find_profile("a100-80gb"), packages=(str(file),))
    with pytest.raises(UsageError, match=said), CaptureSession(options):
        pass


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
    done = warm.memplan(Path.cwd(), *command, str(folder / "pretrain.py"), "--width", "64")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {item["reason"] for item in answer["kernels"]} == {"fused_mlp 0.3, csrc/forward.cu"}
    assert answer["low_bytes"] < answer["peak_bytes"] < answer["high_bytes"]
