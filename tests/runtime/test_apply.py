"""A plan in effect on one module, or on every root module of a script, over several calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memplan.runtime.apply import AppliedEverywhere, AppliedToModule, RootNames, _Calls
from memplan.runtime.tape.functions import top_hooks
from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart
from tests.runtime.harness import recomputations, same_bits

OPS = ["addmm", "exp", "sin", "clone", "mul.Tensor", "add.Tensor"]
EVERYTHING = RecomputePart(
    groups=[
        RecomputeGroup(
            f"call {call}",
            [
                OpOutput(f"aten.{op}" if "." in op else f"aten.{op}.default", nth, 0, call)
                for op in OPS
                for nth in range(9)
            ],
        )
        for call in range(4)
    ]
)


class Net(nn.Module):
    """`middle` is called with the module and what the first layer made."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor] = lambda _, x: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.seen = nn.Buffer(torch.ones(8))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self, torch.exp(self.first(x)))
        return torch.sin(self.second(x)) * torch.exp(x)


Apply = Callable[[nn.Module], Any]


def to_module(module: nn.Module) -> AppliedToModule:
    return AppliedToModule(module, EVERYTHING)


def everywhere(_module: nn.Module) -> AppliedEverywhere:
    return AppliedEverywhere(EVERYTHING)


def nothing_left() -> bool:
    return _get_current_dispatch_mode_stack() == [] and top_hooks() is None


class Other(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("apply", [to_module, everywhere], ids=["module", "everywhere"])
def test_after_an_interrupt_the_plan_is_in_effect_again(apply: Apply) -> None:
    class Interrupts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if interrupt:
                raise KeyboardInterrupt
            return x

    net = nn.Sequential(Net(lambda _, x: nn.functional.dropout(x, 0.3)), Interrupts())
    interrupt = False

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        net.zero_grad()
        loss = net(torch.randn(6, 8)).square().mean()
        loss.backward()
        return [loss, *(p.grad for p in net.parameters() if p.grad is not None)]

    plain = step()
    with apply(net):
        interrupt = True
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                step()
        interrupt = False
        with recomputations() as names:
            again = step()
        assert names == ["call 0"]
        assert all(same_bits(one, two) for one, two in zip(plain, again, strict=True))
        assert nothing_left()
        interrupt = True
        with pytest.raises(KeyboardInterrupt):
            step()
    assert nothing_left()


@pytest.mark.parametrize("apply", [to_module, everywhere], ids=["module", "everywhere"])
def test_a_module_that_a_transform_calls(apply: Apply) -> None:
    """`torch.func.grad` refuses saved-tensor hooks, `vmap` alone does not."""
    net = Net().eval()
    weights: dict[str, Tensor] = dict(net.named_parameters())
    rows = torch.randn(6, 1, 8)

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(net, weights, (row,)).square().mean()

    def step() -> list[Tensor]:
        net.zero_grad()
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, rows)
        moved = {name: weights[name] - found[name].mean(0) for name in weights}
        torch.func.vmap(loss, (None, 0))(moved, rows).mean().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    plain = step()
    with apply(net):
        again = step()
    assert plain and all(same_bits(one, two) for one, two in zip(plain, again, strict=True))


def test_kinds_of_passes_are_told_apart_by_the_roots_that_they_call() -> None:
    """Whichever comes next, and whether or not an optimizer steps in between."""
    part = msgspec.structs.replace(EVERYTHING, kinds=[["Net"], ["Net#1", "Net"]])
    nets = [Net(), Net(), Net()]
    with AppliedEverywhere(part):
        for called, recomputed in (
            ([0], ["call 0"]),
            ([1, 0], ["call 2", "call 1"]),
            ([1, 0], ["call 2", "call 1"]),
            ([0], ["call 0"]),
            ([2, 0], ["call 0"]),  # no kind names the third: as if it was not called
            ([0, 0], ["call 0"]),
        ):
            with recomputations() as names:
                x = torch.randn(6, 8)
                for number in called:
                    x = nets[number](x)
                x.square().mean().backward()
            assert names == recomputed


def test_a_pass_that_may_still_be_of_two_kinds_follows_both() -> None:
    first, _, third, _ = EVERYTHING.groups
    part = RecomputePart(groups=[first, third], kinds=[["Net"], ["Net", "Net"]])
    net, notes = Net(), list[str]()
    with AppliedEverywhere(part, notes.append), recomputations() as names:
        net(net(torch.randn(6, 8))).square().mean().backward()
    assert names == ["call 2", "call 0"]


def test_a_plan_for_roots_that_the_job_does_not_call_is_said_to_have_no_effect() -> None:
    notes: list[str] = []
    for kinds in ([["Net"]], [["Other"]]):
        with AppliedEverywhere(msgspec.structs.replace(EVERYTHING, kinds=kinds), notes.append):
            Net()(torch.randn(6, 8)).sum().backward()
    [note] = [one for one in notes if "none of the modules" in one]
    assert "ran as without it" in note


def test_forwards_that_were_interrupted_are_not_counted_among_the_roots_of_a_pass() -> None:
    def interrupts(_: Any, x: Tensor) -> Tensor:
        if interrupt:
            raise KeyboardInterrupt
        return x

    part = msgspec.structs.replace(EVERYTHING, kinds=[["Net", "Net"]])
    net, interrupt = Net(interrupts), True
    with AppliedEverywhere(part):
        with pytest.raises(KeyboardInterrupt):
            net(torch.randn(6, 8))
        interrupt = False
        with recomputations() as names:
            net(net(torch.randn(6, 8))).square().mean().backward()
        assert names == ["call 1", "call 0"]


def test_parts_of_a_module_have_one_name_each_time_they_are_made() -> None:
    net, names = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), RootNames()
    for _ in range(2):
        assert names.of(net[:1]) == "Sequential"
        assert names.of(net[1:]) == "Sequential#1"
    assert names.of(net) == "Sequential"


def test_passes_without_a_backward_pass_take_no_more_and_more_memory() -> None:
    calls = _Calls(msgspec.structs.replace(EVERYTHING, kinds=[["Net"]]), every_call=False)
    net, numbers = Net(), set()
    for _ in range(9):
        calls.enter(net)
        assert calls._running.call is not None
        numbers.add(calls._running.call[1])
        calls.leave()
    assert numbers == {("Net",), ("Net", "Net")}


def test_what_was_entered_after_an_interrupt_stays() -> None:
    def interrupt(_net: Any, _x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    net = Net(interrupt)
    applied = AppliedToModule(net, EVERYTHING)
    with pytest.raises(KeyboardInterrupt):
        net(torch.randn(6, 8))
    (left,) = _get_current_dispatch_mode_stack()
    with Other() as other:
        net.middle = lambda _, x: x
        with recomputations() as names:
            net(torch.randn(6, 8)).sum().backward()
        assert names == ["call 0"]
        assert _get_current_dispatch_mode_stack() == [left, other]
    applied.remove()
    left.__exit__(None, None, None)
    assert nothing_left()


def counts(net: Any, x: Tensor) -> Tensor:
    """As spectral norm does with its vectors: read through a copy, and advanced in every call."""
    net.seen.mul_(1.5)
    return x * net.seen.clone().exp() * 0.1


def reads_statistics(net: Any, x: Tensor) -> Tensor:
    made = net.norm(x)
    return made * torch.exp(net.norm.running_mean + 1) * 0.1


@pytest.mark.parametrize("apply", [to_module, everywhere], ids=["module", "everywhere"])
@pytest.mark.parametrize("middle", [counts, reads_statistics])
def test_a_later_call_writes_what_an_earlier_one_read(
    middle: Callable[[Any, Tensor], Tensor], apply: Apply
) -> None:
    def steps(net: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        left = []
        for _ in range(3):
            net.zero_grad()
            loss = sum(net(torch.randn(6, 8)).square().mean() for _ in range(3))
            loss.backward()
            grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            left += [loss.detach(), *grads, *net.state_dict().values()]
        return [tensor.clone() for tensor in left]

    net = Net(middle)
    other = copy.deepcopy(net)
    plain = steps(other)
    with apply(net), recomputations() as names:
        planned = steps(net)
    assert len(names) >= 9
    assert all(same_bits(one, two) for one, two in zip(plain, planned, strict=True))


def test_a_write_after_forward_is_still_noticed() -> None:
    net = Net(counts)
    with AppliedToModule(net, EVERYTHING):
        loss = net(torch.randn(6, 8)).sum()
        net.seen.add_(1)  # outside of every call
        net(torch.randn(6, 8))
        with pytest.raises(Exception, match="modified in place after the forward pass"):
            loss.backward()


def test_one_module_in_two_threads_at_once() -> None:
    both = threading.Barrier(2, timeout=300)

    def meets(_net: Any, x: Tensor) -> Tensor:
        both.wait()
        x = torch.exp(x)
        if threading.current_thread().name == "second":
            left.wait(300)  # the other leaves first, though it came first
        return x

    def work(x: Tensor) -> None:
        y = net(x)
        if threading.current_thread().name == "first":
            left.set()
        (grad,) = torch.autograd.grad(y.square().mean(), x)
        assert nothing_left()
        grads[threading.current_thread().name] = grad

    results = []
    net = Net(meets)
    inputs = [torch.randn(6, 8, requires_grad=True) for _ in range(2)]
    for applied in (False, True):
        grads: dict[str, Tensor] = {}
        left = threading.Event()
        if applied:
            AppliedToModule(net, EVERYTHING)
        threads = [
            threading.Thread(target=work, args=(x,), name=name)
            for x, name in zip(inputs, ("first", "second"), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        results.append(grads)
    assert results[1].keys() == {"first", "second"}
    assert all(same_bits(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("apply", [to_module, everywhere], ids=["module", "everywhere"])
def test_a_compiled_module_is_compiled_whole(apply: Apply) -> None:
    net = Net()
    x = torch.randn(6, 8, requires_grad=True)
    (plain,) = torch.autograd.grad(net(x).sum(), x)
    torch._dynamo.reset()
    with apply(net):
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    assert same_bits(plain, grad)
    assert nothing_left()
