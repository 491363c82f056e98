"""A foreach or fused op is split into one for each tensor only where no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan.runtime.compiled.dependencies import operators
from memplan.runtime.compiled.program import facts_of
from memplan.runtime.compiled.split import pieces
from tests.order.graphs import random_order
from tests.runtime.compiled.recorded import residual_job, run

aten = torch.ops.aten


def split(func: Any, *args: Any, **kwargs: Any) -> Any:
    return pieces(func, args, list(args), kwargs)


def test_lists_of_tensors_and_of_numbers_are_taken_apart() -> None:
    one, two = torch.ones(2), torch.ones(3)
    assert split(aten._foreach_mul_.ScalarList, [one, two], [2.0, 3.0]) == [
        ([[one], [2.0]], {}),
        ([[two], [3.0]], {}),
    ]
    parts = split(aten._foreach_add_.List, [one, two], [two, one], alpha=2)
    assert [part[1] for part in parts] == [{"alpha": 2}] * 2


@pytest.mark.parametrize(
    "given",
    [
        (aten._foreach_mul_.Scalar, [torch.ones(2)], 2.0),
        (aten.cat.default, [torch.ones(2), torch.ones(2)]),
        (
            aten._amp_foreach_non_finite_check_and_unscale_.default,
            [torch.ones(2), torch.ones(2)],
            torch.zeros(()),
            torch.ones(()),
        ),
        (aten._foreach_mul_.Scalar, [torch.ones(2, device="meta")] * 2, 2.0),
        (aten._foreach_sqrt.default, [torch.ones(2), torch.ones(2, device="meta")]),
    ],
    ids=["of one", "not foreach", "found_inf", "no kernel of the CPU", "two devices"],
)
def test_what_stays_whole(given: Any) -> None:
    assert split(*given) is None


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_split_updates_give_the_same_bits_in_any_order(name: str, options: Any) -> None:
    kind = getattr(torch.optim, name)
    if name == "SGD":
        options = {**options, "lr": 0.1, "momentum": 0.9}
    job, plain = residual_job(kind, **options), residual_job(kind, **options)
    torch.manual_seed(1)
    found = operators(job.program())
    torch.manual_seed(1)
    plain.step(*plain.batches[1])
    updates = [node for node in found.nodes if facts_of(node).splits]
    assert len(updates) >= len(list(job.model.parameters()))
    for number in (2, 3):
        torch.manual_seed(number)
        expected = plain.step(*plain.batches[number])
        torch.manual_seed(number)
        got = run(found, random_order(found.graph, number), job.batches[number])
        assert torch.equal(got, expected)
        for one, two in zip(job.everything(), plain.everything(), strict=True):
            assert torch.equal(one, two)
