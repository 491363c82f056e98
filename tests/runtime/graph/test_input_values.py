"""Steps that branch on numbers of their batches: captured, and again where a number changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.graph.training import Job, assert_as_plain, captures_steps

pytestmark = captures_steps
MASKS = ([0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 1])
"""One for each call."""


def job(of: Callable[..., Tensor], model: Any = None) -> Job:
    model = nn.Linear(3, 3) if model is None else model
    batches = [(torch.randn(4, 3), torch.tensor(mask)) for mask in MASKS]

    def loss_fn(x: Tensor, mask: Tensor) -> Tensor:
        return of(model, x, mask).square().mean()

    return Job(model, [torch.optim.SGD(model.parameters(), 0.1)], loss_fn, batches)


def branch(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    if not mask.any():
        return model(x).sin()
    return model(x)


def read(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) if bool(mask.any()) else model(x).sin()


def as_a_number(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) * (2 if int(mask.sum()) else 3)


def of_an_element(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    *_, last = mask.unbind()
    return model(x) if float(last.sqrt()) > 0.5 else model(x).sin()


def as_a_list(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    sizes = torch.tensor([3, 1]) + mask[2] * torch.tensor([1, -1])
    first, second = model(x).split(sizes.tolist())
    return torch.cat([first.sin(), second])


def written(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    copy = torch.where(mask > 0, 0.0, -1.0)
    copy[0], row = 0.0, copy[1:]
    row.mul_(3.0)
    return model(x) if (copy < 0).all().item() or copy.sum().item() < -3 else model(x).cos()


def autocast(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    """A product that 16 bits round to one."""
    with torch.autocast("cpu", torch.bfloat16):
        product = (mask[None].float() * 1.001) @ torch.ones(3, 1)
        out: Tensor = model(x) if product.item() == 1 else model(x).sin()
    return out.float()


CAPTURED = [branch, read, as_a_number, of_an_element, as_a_list, written, autocast]


@pytest.mark.parametrize("of", CAPTURED)
def test_numbers_that_follow_from_a_batch(of: Any) -> None:
    step, _ = assert_as_plain(lambda: job(of))
    report = step.report()
    assert not report.fallback
    assert (report.plain_calls, len(report.programs)) == (0, 2)


def the_batch_itself(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    mask.add_(1)
    return model(x) if mask.sum().item() > 3 else model(x).sin()


def by_its_data(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    mask.data.add_(1)
    return model(x) if mask.sum().item() > 3 else model(x).sin()


def unseen(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    copy = mask.clone()
    torch.add(mask, 1, out=copy)
    return model(x) if copy.sum().item() > 3 else model(x).sin()


def unseen_by_its_data(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    torch.add(mask, 1, out=mask.data)
    return model(x) if mask.sum().item() > 3 else model(x).sin()


def trained(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) if model.weight.sum().item() > 0 else model(x).sin()


def random(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) if torch.rand(3).argmax().item() else model(x).sin()


OTHERS = [the_batch_itself, by_its_data, unseen, unseen_by_its_data, trained, random]


@pytest.mark.parametrize("of", OTHERS)
def test_other_numbers_run_plainly(of: Any) -> None:
    step, _ = assert_as_plain(lambda: job(of))
    assert step.report().fallback.endswith(") depends on a tensor's value")


def test_a_number_that_only_scales_is_no_constant() -> None:
    def of(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = model(x) / (1 + mask.sum().item())
        return out

    step, _ = assert_as_plain(lambda: job(of))
    assert not step.report().fallback
    assert len(step.report().programs) == 1


def transformer() -> Job:
    """With masks of which PyTorch asks whether they are causal."""
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    masks = (causal, causal, torch.zeros(5, 5), causal)
    batches = [(torch.randn(2, 5, 8), torch.randn(2, 5, 8), mask) for mask in masks]

    def loss_fn(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        made = nn.Transformer.generate_square_subsequent_mask(5)
        out: Tensor = model(x, y, src_mask=made, tgt_mask=mask)
        return out.square().mean()

    return Job(model, [torch.optim.SGD(model.parameters(), 0.1)], loss_fn, batches)


def test_a_transformer_with_masks() -> None:
    step, _ = assert_as_plain(transformer)
    report = step.report()
    assert (report.fallback, report.plain_calls, len(report.programs)) == ("", 0, 2)
