"""What PyTorch does out of the dispatcher's sight, or in another way under a recorder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memplan.api as memplan
from memplan.runtime.compiled.compile import CompiledStep
from tests.runtime.compiled.training import Job, batches, run_both


@dataclass
class Trained:
    model: Any
    optimizer: torch.optim.Optimizer


Body = Callable[[Trained, Tensor, Tensor], Any]
REFUSED: dict[str, tuple[Body, str]] = {}


def job(body: Body, shape: tuple[int, ...] = (5, 6)) -> Job:
    model = nn.Linear(6, 4)
    made = Trained(model, torch.optim.Adam(model.parameters(), lr=0.01))

    def step(x: Tensor, y: Tensor) -> Any:
        return body(made, x, y)

    return Job(model, made.optimizer, step, batches(shape, count=5))


def train(made: Trained, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(made.model(x), y)
    loss.backward()
    made.optimizer.step()
    made.optimizer.zero_grad()
    return loss.detach()


def refused(why: str) -> Callable[[Body], Body]:
    def note(body: Body) -> Body:
        REFUSED[body.__name__] = body, why
        return body

    return note


@refused("argument 0 is made another tensor")
def transposed_batch(made: Trained, x: Tensor, y: Tensor) -> Any:
    x.t_()
    return train(made, x.t(), y)


@refused("argument 0 is made another tensor")
def data_of_the_batch(made: Trained, x: Tensor, y: Tensor) -> Any:
    x.data = x * 2
    return train(made, x, y)


@refused("requires_grad of argument 0")
def batch_with_gradient(made: Trained, x: Tensor, y: Tensor) -> Any:
    return train(made, x.requires_grad_(), y)


@refused("mkldnn is set for a part of the step")
def without_mkldnn(made: Trained, x: Tensor, y: Tensor) -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        return train(made, x, y)


@refused("the default dtype is set for a part of the step")
def another_default_dtype(made: Trained, x: Tensor, y: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        wide = torch.zeros(3)
    finally:
        torch.set_default_dtype(torch.float32)
    return train(made, x, y), wide


@refused("whose storage is resized")
def result_into_nothing(made: Trained, x: Tensor, y: Tensor) -> Any:
    into = torch.empty(0)
    torch.mul(x, 2, out=into)
    return train(made, into, y)


@refused("tensor_split() with sizes that come from a tensor")
def split_by_values(made: Trained, x: Tensor, y: Tensor) -> Any:
    first, second = torch.tensor_split(x, y[:1] % 2 + 1)
    return train(made, torch.cat([second, first]), y)


@refused("a result whose shape depends on values")
def lengths_of_sequences(made: Trained, x: Tensor, y: Tensor) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], y + 1, True, enforce_sorted=False)
    return train(made, x + packed.data.sum(), y)


@refused("the gradient of prod()")
def product(made: Trained, x: Tensor, y: Tensor) -> Any:
    return train(made, x * made.model.weight.prod(), y)


@refused("the gradient of masked_fill()")
def filled_with_a_parameter(made: Trained, x: Tensor, y: Tensor) -> Any:
    return train(made, x.masked_fill(x > 0, made.model.bias[0]), y)


ARRAY = np.ones((5, 6), dtype=np.float32)
ONE, OTHER = torch.from_numpy(ARRAY), torch.from_numpy(ARRAY)


@refused("two tensors over the same memory")
def array_twice(made: Trained, x: Tensor, y: Tensor) -> Any:
    ONE.mul_(2)
    loss = train(made, x + OTHER, y)
    OTHER.sub_(1.5)
    return loss


OTHERWISE = ("product", "filled_with_a_parameter")
"""PyTorch computes their gradients in another way in the recorded call."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_lose_is_refused(name: str) -> None:
    body, why = REFUSED[name]

    def make() -> Job:
        ARRAY.fill(1)
        return job(body)

    with pytest.warns(UserWarning, match="runs plainly") as told:
        if name in OTHERWISE:
            made = make()
            step = memplan.compile(made.step, model=made.model, optimizer=made.optimizer)
            for batch in made.batches:
                step(*batch)
        else:
            run_both(make)
    assert any(why in str(one.message) for one in told), [str(one.message) for one in told]


def compiled(make: Callable[[], Job]) -> CompiledStep[..., Any]:
    step, _ = run_both(make)
    assert step.report().compiled_calls == 3, step.report()
    return step


def test_operators_run_in_their_own_grad_mode() -> None:
    """An LSTM's kernel is another one where autograd is off."""
    recurrent = nn.LSTM(6, 6, 2, batch_first=True)

    def body(made: Trained, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            states, _ = recurrent(x)
        return train(made, states.mean(1), y), states

    compiled(lambda: job(body, shape=(5, 3, 6)))


def test_a_frozen_transformer_takes_its_fast_path() -> None:
    def make() -> Job:
        layer = nn.TransformerEncoderLayer(6, 2, 16, batch_first=True)
        teacher = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)

        def body(made: Trained, x: Tensor, y: Tensor) -> Any:
            with torch.no_grad():
                seen = teacher(x)
            return train(made, seen.mean(1), y), seen

        return job(body, shape=(5, 3, 6))

    compiled(make)


def test_numbers_for_each_tensor_may_come_as_a_tensor() -> None:
    def body(made: Trained, x: Tensor, y: Tensor) -> Any:
        loss = train(made, x, y)
        weights = list(made.model.parameters())
        with torch.no_grad():
            torch._foreach_addcmul_(weights, weights, weights, torch.tensor([0.1, 0.2]))
        return loss

    compiled(lambda: job(body))


def test_lengths_that_are_the_same_in_each_step_are_captured() -> None:
    recurrent = nn.LSTM(6, 6)

    def body(made: Trained, x: Tensor, y: Tensor) -> Any:
        lengths = torch.tensor([3, 3, 2, 2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        states, _ = nn.utils.rnn.pad_packed_sequence(recurrent(packed)[0], batch_first=True)
        return train(made, states.mean(1), y)

    compiled(lambda: job(body, shape=(5, 3, 6)))


def test_a_detached_weight_that_is_returned_is_no_parameter() -> None:
    def body(made: Trained, x: Tensor, y: Tensor) -> Any:
        weight = made.model.weight
        return train(made, x, y), weight.detach(), weight.detach()[0], weight, x

    made = job(body)
    step = memplan.compile(made.step, model=made.model, optimizer=made.optimizer, order=False)
    for x, y in made.batches:
        _, detached, row, weight, batch = step(x, y)
        assert weight is made.model.weight and batch is x
        assert type(detached) is Tensor
        assert not detached.requires_grad and not row.requires_grad
        assert detached.data_ptr() == row.data_ptr() == weight.data_ptr()
        row.add_(0.1)  # a part of a leaf that requires a gradient would not allow it
    assert step.report().compiled_calls == 3
