"""Values that a step's own inputs lead to in a few operators are looked up before each call."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memplan.runtime.compiled.compile import CompiledStep
from tests.runtime.compiled.test_bit_identity import adam, perceptron
from tests.runtime.compiled.training import Job, batches, run_both

Body = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def job_of(body: Body, masks: list[Tensor], optimizer_of: Any = adam) -> Callable[[], Job]:
    """Trains on what `body` makes of the model, the input, the labels and a mask of its own."""

    def make() -> Job:
        model = perceptron()
        optimizer = optimizer_of(model.parameters())

        def step(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = body(model, x, y, mask)
            loss.backward()
            optimizer.step()
            return loss.detach()

        given = [
            (*batch, mask.clone())
            for batch, mask in zip(batches((5, 6), count=len(masks)), masks, strict=True)
        ]
        return Job(model, optimizer, step, given)

    return make


def masks_of(pattern: str) -> list[Tensor]:
    """All ones for `1`, with a hole for `0`."""
    masks = [torch.ones(5, 4) for _ in pattern]
    for mask, one in zip(masks, pattern, strict=True):
        mask[2, 1] = float(one)
    return masks


def branching(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    out = model(x)
    if not (mask > 0).all():
        out = out * mask
    return F.cross_entropy(out, y)


def programs(compiled: CompiledStep[..., Any]) -> list[int]:
    """Calls served by each of the programs."""
    return [one.calls for one in compiled.report().programs]


def test_a_step_may_branch_on_an_argument() -> None:
    compiled, _ = run_both(job_of(branching, masks_of("1110011010")))
    report = compiled.report()
    assert len(report.programs) == 2
    assert report.compiled_calls == 10 - 1 - 2
    assert report.plain_calls == 1 + 2


def test_a_call_that_takes_the_other_branch_says_which(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memplan"):
        run_both(job_of(branching, masks_of("1110")))
    (line,) = [one.getMessage() for one in caplog.records]
    source, first = inspect.getsourcelines(branching)
    branch = first + next(n for n, text in enumerate(source) if "mask > 0" in text)
    assert f"test_foreseen.py:{branch}" in line
    assert "a branch on the value of a tensor" in line and "gives False instead of True" in line


def test_what_the_slice_writes_is_written_once() -> None:
    """The argument is changed in place before the branch: looking ahead must not change it too."""

    def body(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        mask.mul_(0.5)
        out = model(x) * mask
        return F.cross_entropy(out if mask.sum() > 9.9 else out + 1, y)

    compiled, _ = run_both(job_of(body, masks_of("111011")))
    assert sum(programs(compiled)) == 3


def test_a_view_in_the_middle_of_its_storage() -> None:
    base = [torch.arange(40.0).reshape(5, 8) + number for number in range(6)]
    masks = [whole[:, 2:6] for whole in base]

    def body(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        mask.sub_(2.0)
        return F.cross_entropy(model(x) * (2 if mask[0, 0] < 3 else 3), y)

    def make() -> Job:
        job = job_of(body, masks)()
        job.batches = [
            (x, y, whole.clone()[:, 2:6])
            for (x, y, _), whole in zip(job.batches, base, strict=True)
        ]
        return job

    compiled, _ = run_both(make)
    assert len(programs(compiled)) == 2


def test_two_arguments_on_one_storage_of_which_one_is_written() -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor, one: Tensor, other: Tensor) -> Tensor:
            optimizer.zero_grad()
            one.add_(1)
            loss = F.cross_entropy(model(x) * (2 if other.sum() > 6 else 3), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        given = []
        for number, (x, y) in enumerate(batches((5, 6))):
            both = torch.full((6,), number / 4)
            given.append((x, y, both, both[1:]))
        return Job(model, optimizer, step, given)

    compiled, _ = run_both(make)
    assert sum(programs(compiled)) == 4


@pytest.mark.parametrize("foreach", [False, True])
def test_radam_branches_on_its_count_of_steps(foreach: bool) -> None:
    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.RAdam(parameters, lr=0.01, foreach=foreach)

    compiled, _ = run_both(job_of(branching, masks_of("1" * 10), optimizer_of))
    assert len(programs(compiled)) == 2
    assert sum(programs(compiled)) == 7


def test_a_value_that_is_another_one_each_time_ends_it() -> None:
    masks = [torch.full((5, 4), float(number)) for number in range(1, 9)]

    def body(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) / int(mask.max())

    with pytest.warns(UserWarning, match="yet another one in each of the calls before"):
        compiled, _ = run_both(job_of(body, masks))
    assert compiled.report().compiled_calls == 0


def test_what_rests_on_weights_is_not_foreseen() -> None:
    def body(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        weight = next(model.parameters())
        return F.cross_entropy(model(x), y) * (2 if weight.sum() > 0 else 3)

    with pytest.warns(UserWarning, match="a branch on the value of a tensor"):
        compiled, _ = run_both(job_of(body, masks_of("111111")))
    assert compiled.report().compiled_calls == 0


def test_random_numbers_are_not_drawn_ahead() -> None:
    def body(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) * (2 if torch.rand(()) * mask.sum() > 10 else 3)

    with pytest.warns(UserWarning, match="a branch on the value of a tensor"):
        compiled, _ = run_both(job_of(body, masks_of("111111")))
    assert compiled.report().compiled_calls == 0


def test_a_budget_keeps_them() -> None:
    compiled, _ = run_both(job_of(branching, masks_of("111001")), budget="1MiB")
    assert sum(programs(compiled)) == 3
