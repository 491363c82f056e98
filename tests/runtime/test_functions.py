"""Functions with a backward of their own, and ops of other libraries: they run once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.runtime.tape import Recording, functions
from memplan.runtime.tape.groups import checksum_of
from memplan.types.errors import RecomputeError
from tests.runtime.harness import Job, check, everything, naive_way_fails, outcome

RUNS: list[str] = []


class Scale(torch.autograd.Function):
    """Everything that a function may do with its context, and a side effect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, power: float) -> tuple[Tensor, Tensor]:
        RUNS.append("scale")
        y = torch.exp(x * factor) * torch.rand_like(x)
        ctx.save_for_backward(x, factor, y)
        ctx.power, ctx.scratch = power, y.cos()
        signs = y.sign()
        ctx.mark_non_differentiable(signs)
        return y, signs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, factor, y = ctx.saved_tensors
        grad = grad * y * ctx.scratch**ctx.power
        return grad * factor, (grad * x).sum(), None


class Square(torch.autograd.Function):
    """The newer way to write one, differentiable twice."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        RUNS.append("square")
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class InPlace(torch.autograd.Function):
    """Writes to its input by recorded ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2).sin_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class RawInPlace(torch.autograd.Function):
    """Writes to its input as a kernel outside PyTorch would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.detach().numpy()[...] *= 2
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Raw(torch.autograd.Function):
    """Fills its result as a kernel outside PyTorch would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.numpy()[...] = 3 * x.detach().numpy()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 3 * grad * y


class Identity(torch.autograd.Function):
    """A gradient reversal: the result is a view of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


BOUND_EARLY = RawInPlace.apply


@torch.library.custom_op("memplan_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    RUNS.append("noisy")
    return torch.exp(x * torch.rand_like(x))


def _noisy_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


noisy.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=_noisy_context)


@torch.library.custom_op("memplan_tests::add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor) -> None:
    RUNS.append("add_into")
    x.add_(y)


def custom_write(x: Tensor) -> Tensor:
    total = torch.ones_like(x)
    add_into(total, x.detach())
    add_into(total, torch.sin(x.detach()))
    return torch.exp(x * total)


def numpy_into_empty(x: Tensor) -> Tensor:
    made = torch.empty(x.shape)
    made.numpy()[...] = x.detach().numpy() * 2
    return torch.exp(x * made)


def numpy_into_empty_unsaved(x: Tensor) -> Tensor:
    made = torch.empty(x.shape)
    made.numpy()[...] = x.detach().numpy() * 2
    return torch.exp(x + made)


def returned_empty(x: Tensor) -> Tensor:
    """Saved by autograd before any op has read it."""
    made = torch.empty(x.shape)
    made.numpy()[...] = 0.5
    return x * made


def numpy_into_zeros(x: Tensor) -> Tensor:
    made = torch.zeros(x.shape)
    made.numpy()[...] = x.detach().numpy() * 2
    return torch.exp(x * made)


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.middle = nn.Linear(8, 8), nn.Linear(8, 8), middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.first(x)) * 0.5)
        return torch.sigmoid(self.middle(self.second(x) * 0.5))


def step(model: Any) -> list[Any]:
    RUNS.clear()
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss, x.grad, len(RUNS)]


def scale(x: Tensor) -> Tensor:
    y, signs = Scale.apply(x, torch.tensor(0.3, requires_grad=True), 2.0)
    return torch.sin(y) * signs


WITH_EFFECTS: dict[str, Callable[[Tensor], Tensor]] = {
    "context": scale,
    "setup_context": lambda x: torch.sin(Square.apply(x)),
    "custom op": lambda x: torch.sin(noisy(x)),
    "custom op that writes": custom_write,
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: torch.exp(InPlace.apply(torch.sin(x))),
    "in place, unseen": lambda x: torch.exp(RawInPlace.apply(torch.sin(x).add(1))),
    "in place, unseen, bound before": lambda x: torch.exp(BOUND_EARLY(torch.sin(x).add(1))),
    "result filled unseen": lambda x: torch.exp(Raw.apply(torch.sin(x))),
    "identity": lambda x: torch.exp(Identity.apply(torch.sin(x))),
    "NumPy into empty": numpy_into_empty,
    "NumPy into empty, not saved": numpy_into_empty_unsaved,
    "NumPy into empty, saved at once": returned_empty,
}


@pytest.mark.parametrize("middle", WITH_EFFECTS.values(), ids=WITH_EFFECTS.keys())
def test_side_effects_happen_once(middle: Callable[[Tensor], Tensor]) -> None:
    job = Job(lambda: Net(middle), step)
    assert naive_way_fails(job)  # they are counted
    check(job)


@pytest.mark.parametrize("middle", OTHERS.values(), ids=OTHERS.keys())
def test_functions(middle: Callable[[Tensor], Tensor]) -> None:
    check(Job(lambda: Net(middle), step))


def test_writes_that_nothing_shows_are_found_by_the_checksum() -> None:
    job = Job(lambda: Net(numpy_into_zeros), step)
    with pytest.raises(RecomputeError, match="gave other values") as raised:
        outcome(job, everything(job))
    assert "where PyTorch cannot see it" in raised.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_the_checksum_notices_an_exchange_and_a_bit(dtype: torch.dtype, dimension: int) -> None:
    tensor = (torch.randn(4, 3, 5) * 9).to(dtype)
    first = checksum_of(tensor)
    assert first is not None and first.equal(checksum_of(tensor.clone()))  # type: ignore[arg-type]
    assert not first.equal(checksum_of(tensor.roll(1, dimension)))  # type: ignore[arg-type]
    tensor[2, 1, 3] += 1
    assert not first.equal(checksum_of(tensor))  # type: ignore[arg-type]


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.mT, lambda t: t[:, ::3, 1:]])
def test_the_checksum_of_a_large_tensor_is_taken_in_small_pieces(
    view: Callable[[Tensor], Tensor],
) -> None:
    tensor = view(torch.randn(3, 300, 700).bfloat16())
    first = checksum_of(tensor)
    for dimension in range(3):
        tensor.copy_(tensor.flip(dimension))
        assert not torch.equal(first, checksum_of(tensor))  # type: ignore[arg-type]
        tensor.copy_(tensor.flip(dimension))
        assert torch.equal(first, checksum_of(tensor))  # type: ignore[arg-type]
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if not func.is_view and isinstance(result, Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Largest():
        checksum_of(tensor)
    assert 0 < largest <= tensor.numel()


def test_without_watching_functions_their_unseen_writes_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(lambda: Net(OTHERS["in place, unseen"]), step)
    decisions = everything(job)
    monkeypatch.setattr(Recording, "call_function", lambda _self, call, _args: call())
    with pytest.raises(RecomputeError, match="gave other values"):
        outcome(job, decisions)


def test_nothing_stays_patched() -> None:
    before = dict(functions._function.__dict__), torch.autograd.graph.disable_saved_tensors_hooks
    job = Job(lambda: Net(scale), step)
    outcome(job, everything(job))
    after = dict(functions._function.__dict__), torch.autograd.graph.disable_saved_tensors_hooks
    assert before == after
    assert "apply" not in after[0]
