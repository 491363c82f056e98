"""What programs do with autograd: keep graphs, differentiate twice, hook in, ask for parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.runtime.harness import Job, check, checkpointed, everything, outcome


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.hidden: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(torch.sigmoid(self.first(x)), 0.2)
        self.hidden = torch.exp(self.second(x)) * x
        return torch.sin(self.third(self.hidden)) * self.hidden


def begin(model: Any) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 8, requires_grad=True)
    return model(x).square().mean(), x


def two_backwards(model: Any) -> list[Any]:
    loss, x = begin(model)
    loss.backward(retain_graph=True)
    first = x.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    return [loss, first, x.grad]


def no_third_backward(model: Any) -> list[Any]:
    loss, x = begin(model)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return [loss, x.grad]


def two_losses(model: Any) -> list[Any]:
    x = torch.randn(6, 8, requires_grad=True)
    y = model(x)
    y.sum().backward(retain_graph=True)
    model.hidden.exp().mean().backward(retain_graph=True)
    y.square().mean().backward()
    return [y, x.grad]


def parts(model: Any) -> list[Any]:
    loss, x = begin(model)
    one = torch.autograd.grad(loss, model.hidden, retain_graph=True)
    two = torch.autograd.grad(loss, [model.third.weight, x], retain_graph=True)
    three = torch.autograd.grad(model.hidden.sum(), model.first.weight)
    return [loss, *one, *two, *three]


def double(model: Any) -> list[Any]:
    loss, x = begin(model)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    penalty = (grad.norm(2, 1) - 1).square().mean()
    (loss + penalty).backward()
    return [loss, penalty, x.grad]


def double_later(model: Any) -> list[Any]:
    loss, x = begin(model)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()  # type: ignore[union-attr]
    return [loss, x.grad, *grads]


def triple(model: Any) -> list[Any]:
    loss, x = begin(model)
    (one,) = torch.autograd.grad(loss, x, create_graph=True)
    (two,) = torch.autograd.grad(one.exp().sum(), x, create_graph=True)
    (three,) = torch.autograd.grad(two.sum(), x)
    return [loss, one, two, three]


def tensor_hooks(model: Any) -> list[Any]:
    seen: list[Any] = []
    x = torch.randn(6, 8, requires_grad=True)
    y = model(x)
    model.hidden.retain_grad()
    model.hidden.register_hook(lambda grad: grad * 2)
    y.register_hook(lambda grad: seen.append(grad.clone()))
    model.third.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y.square().mean().backward()
    return [y, x.grad, model.hidden.grad, *seen]


def module_hooks(model: Any) -> list[Any]:
    seen: list[Any] = []
    model.second.register_forward_pre_hook(lambda _m, inputs: (inputs[0] * 1.5,))
    model.second.register_forward_hook(lambda _m, _i, output: output + len(seen))
    model.second.register_forward_hook(lambda *_: seen.append("forward"))
    model.second.register_full_backward_hook(lambda _m, into, out: seen.extend([*into, *out]))
    model.second.register_full_backward_pre_hook(lambda _m, out: (out[0] * 2,))
    loss, x = begin(model)
    loss.backward()
    return [loss, x.grad, *seen]


def saved_hooks_of_others(model: Any) -> list[Any]:
    """Theirs are outside: ours take their place in the model, and theirs stay in force around."""
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.detach()

    x = torch.randn(6, 8, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
        before = len(packed)
        loss = y.square().mean()
        after = len(packed) - before
    loss.backward()
    return [loss, x.grad, after]


def anomaly(model: Any) -> list[Any]:
    with torch.autograd.detect_anomaly(check_nan=True):
        loss, x = begin(model)
        loss.backward()
    return [loss, x.grad]


def detached_and_back(model: Any) -> list[Any]:
    loss, x = begin(model)
    kept = model.hidden.detach()
    kept_before = kept.clone()
    loss.backward()
    return [loss, x.grad, kept, kept.equal(kept_before)]


STEPS = [
    two_backwards, no_third_backward, two_losses, parts, double, double_later, triple,
    tensor_hooks, module_hooks, saved_hooks_of_others, detached_and_back,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=[step.__name__ for step in STEPS])
def test_uses_of_the_graph(step: Any) -> None:
    check(Job(Net, step))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_under_anomaly_detection() -> None:
    check(Job(Net, anomaly))


def test_module_hooks_run_twice_in_the_naive_way() -> None:
    job = Job(Net, module_hooks)

    def counted(model: Any) -> list[Any]:
        calls: list[int] = []
        hooked = getattr(model, "__wrapped__", model)
        NETS[-1].second.register_forward_hook(lambda *_: calls.append(1))
        loss, x = begin(hooked)
        loss.backward()
        return [loss, x.grad, len(calls)]

    def model() -> nn.Module:
        NETS.append(Net())
        return NETS[-1]

    NETS: list[Any] = []  # noqa: N806
    job = Job(model, counted)
    assert outcome(job, wrap=checkpointed).seen[-1] == 2
    assert outcome(job, everything(job)).seen[-1] == outcome(job).seen[-1] == 1


def test_energy_model() -> None:
    """Forces are a gradient taken in forward; training differentiates them again."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.net(x).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
                (plain,) = torch.autograd.grad(energy.exp(), x, retain_graph=True)
            return torch.sin(energy), torch.tanh(force) * plain

    def step(model: Any) -> list[Any]:
        energy, force = model(torch.randn(6, 8))
        loss = energy.square() + force.square().mean()
        loss.backward()
        return [loss, force]

    check(Job(Energy, step))


def test_hooks_inside_the_model_win() -> None:
    class Offloads(Net):
        def forward(self, x: Tensor) -> Tensor:
            with save_on_cpu():
                x = torch.sigmoid(self.first(x)).exp()
            return torch.sin(self.third(x)) * x

    def step(model: Any) -> list[Any]:
        loss, x = begin(model)
        loss.backward()
        return [loss, x.grad]

    check(Job(Offloads, step))


@pytest.mark.parametrize("kind", ["input", "output", "hidden"])
def test_changed_between_forward_and_backward(kind: str) -> None:
    """Plain eager raises for what it saved. A tape gives the right result, or raises too."""

    def spoiled(model: Any) -> list[Any]:
        x = torch.randn(6, 8)
        y = model(x)
        loss = y.square().mean()
        with torch.no_grad():
            {"input": x, "output": y, "hidden": model.hidden}[kind].mul_(3)
        loss.backward()
        return [loss]

    def good(model: Any) -> list[Any]:
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        return [loss]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outcome(Job(Net, spoiled))
    right = outcome(Job(Net, good))
    try:
        taped = outcome(Job(Net, spoiled), everything(Job(Net, good)))
    except Exception as error:
        assert "modified" in str(error)
    else:
        assert taped.differences(right) == []


def test_what_a_backward_modified_is_an_error_in_the_next() -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sigmoid()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x: Tensor = ctx.saved_tensors[0]
            return x.mul_(grad)

    class Spoiled(Net):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Spoils.apply(self.first(x) * 2)
            return made

    def step(model: Any) -> list[Any]:
        loss, x = begin(model)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return [loss, x.grad]

    check(Job(Spoiled, step))
