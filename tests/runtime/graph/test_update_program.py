"""Updates in chunks: the optimizer's numbers, and temporaries that are no larger than a chunk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.runtime.graph import update_program
from memplan.runtime.graph.update_nodes import TakeGradient
from memplan.runtime.graph.updates import UpdatePlan, Updates

PIECE = 64
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
IN_PIECES: list[Make] = [
    torch.optim.Adam,
    lambda given: torch.optim.AdamW(given, amsgrad=True, maximize=True),
    lambda given: torch.optim.SGD(given, lr=0.1, weight_decay=0.1),
    lambda given: torch.optim.RMSprop(given, momentum=0.9, centered=True),
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(update_program.ELEMENTS, "cpu", PIECE)


class Largest(TorchDispatchMode):
    """How many elements new memory had at most."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        known = {one.untyped_storage()._cdata for one in given}
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in known:
                self.elements = max(self.elements, one.numel())
        return result


def parameters() -> list[nn.Parameter]:
    picture = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    return [nn.Parameter(one) for one in (torch.randn(20, 11).t(), picture, torch.randn(3))]


class Trained:
    """Parameters that one side updates as a step does, and the other by the optimizer."""

    def __init__(self, make: Make) -> None:
        self.mine = parameters()
        self.theirs = copy.deepcopy(self.mine)
        self.optimizers = make(self.mine), make(self.theirs)
        self.updates = Updates(self.optimizers[:1])
        self.updates.chunked = True
        self.plan = UpdatePlan(self.updates)

    def step(self, lay: Callable[[Tensor], Tensor] = torch.clone) -> int:
        """The most elements of a temporary."""
        gradients = [lay(torch.randn_like(one)) for one in self.mine]
        self.updates.begin()
        self.updates.in_graph = True
        self.plan.begin(self.mine)
        largest = Largest()
        for mine, theirs, gradient in zip(self.mine, self.theirs, gradients, strict=True):
            theirs.grad = gradient.clone()
            with largest:
                TakeGradient(self.updates, False)(mine, [gradient])
        self.optimizers[1].step()
        torch.testing.assert_close(self.mine, self.theirs, rtol=1e-6, atol=1e-7)
        mine, theirs = (one.state_dict()["state"] for one in self.optimizers)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        return largest.elements


@pytest.mark.parametrize("make", IN_PIECES)
def test_numbers_and_temporaries(make: Make) -> None:
    trained = Trained(make)
    for number in range(7):  # RAdam's arithmetic is another one from the sixth on
        for optimizer in trained.optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        assert 0 < trained.step() <= PIECE


def test_arithmetic_that_begins_otherwise() -> None:
    """The first update makes the state: it is the optimizer's own."""
    trained = Trained(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9))
    trained.step()
    for optimizer in trained.optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.1
    assert 0 < trained.step() <= PIECE


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Rprop])
def test_what_is_not_pointwise_is_updated_as_a_whole(make: Make) -> None:
    trained = Trained(make)
    for _ in range(3):
        assert trained.step() > PIECE


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adafactor])
def test_scratch_bytes(make: Make) -> None:
    trained = Trained(make)
    trained.updates.begin()
    large, _, small = (trained.updates.scratch_bytes(one, one.stride()) for one in trained.mine)
    assert small < large
    # Adam's root, which it divides and adds to in place.
    assert (large <= 4 * PIECE + 16) == (make is torch.optim.Adam)
    first, _, last = (one.contiguous().stride() for one in trained.mine)
    copied = trained.updates.scratch_bytes(trained.mine[0], first)
    # The copied piece of the gradient is gone by then.
    assert (copied <= large) == (make is torch.optim.Adam)
    assert trained.updates.scratch_bytes(trained.mine[2], last) == small


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_gradients_that_lie_in_another_way(make: Make) -> None:
    """As convolutions with channels last make them: a piece is some rows of the parameter."""
    trained = Trained(make)
    row = max(one.numel() // len(one) for one in trained.mine[:2])
    for _ in range(2):
        assert 0 < trained.step(Tensor.contiguous) <= max(row, PIECE)


def test_state_that_lies_in_another_way() -> None:
    trained = Trained(torch.optim.Adam)
    trained.step()
    for optimizer, (one, *_) in zip(
        trained.optimizers, (trained.mine, trained.theirs), strict=True
    ):
        state = optimizer.state[one]
        state["exp_avg"] = state["exp_avg"].contiguous()
    assert trained.step() > PIECE
