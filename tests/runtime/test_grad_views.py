"""Gradients as views of DistributedDataParallel's buckets, in a job of two processes: the same
bits, and an error before a value is used that a job would not have without them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memplan.runtime import grad_views
from memplan.runtime.grad_views import GradViews
from memplan.types.errors import GradViewsError
from tests.runtime.harness import same_bits
from tests.runtime.two_ranks import found_by, parallel, run

Train = Callable[[nn.Module, torch.optim.Optimizer, list[Any]], None]


def loss(model: nn.Module) -> Tensor:
    found: Tensor = model(torch.randn(6, 8)).square().mean()
    return found


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def accumulating(model: Any, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    for _ in range(3):
        for last in (False, False, True):
            with nullcontext() if last else model.no_sync():
                loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        kept += [float(one.grad.norm()) for one in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()


def zeroing(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    for _ in range(3):
        loss(model).backward()
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def keeping(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        kept[:] = [next(model.parameters()).grad]


def keeping_another_view(model: Any, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        kept[:] = [next(model.parameters()).grad.view(-1)]


def keeping_the_first(model: Any, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    """Buckets are made anew after the first pass."""
    for _ in range(3):
        loss(model).backward()
        kept[:] = kept or [next(model.parameters()).grad]
        optimizer.zero_grad(set_to_none=False)


def putting_others(model: Any, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        for one in model.parameters():
            one.grad.data = one.grad.data * 0.5
        optimizer.step()


def hooked(model: Any, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    plainly(model, optimizer, kept)


def reading(model: Any, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    def hook(*_: Any) -> None:
        kept.extend(float(one.grad.norm()) for one in model.parameters() if one.grad is not None)

    next(model.parameters()).register_hook(hook)
    plainly(model, optimizer, kept)


SAME: list[Train] = [plainly, accumulating, zeroing]
REFUSED: dict[Train, str] = {
    keeping: "kept over the next one",
    keeping_another_view: "kept over the next one",
    keeping_the_first: "kept over the next one",
    putting_others: "other memory",
    hooked: "a hook waits",
    reading: "is read in the backward pass",
}


def trained(train: Train, rank: int, *, views: bool) -> tuple[list[Tensor], list[Any], bool, str]:
    """Weights, what was kept, whether gradients lay in buckets, and the error."""
    said: list[str] = []
    kept: list[Any] = []
    with GradViews(said.append) if views else nullcontext():
        model, _ = parallel("ddp", 2)
        assert not model.gradient_as_bucket_view, "copies would have it, and nothing follows them"
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        torch.manual_seed(1 + rank)
        try:
            train(model, optimizer, kept)
        except GradViewsError as error:
            said.append(error.message)
        loss(model.get_submodule("module"))  # after an error the model is usable
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
    shared = len({one.untyped_storage()._cdata for one in gradients}) == 1
    return [one.detach() for one in model.parameters()], kept, shared, "; ".join(said)


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for train in (*SAME, *REFUSED):
        plain, plain_kept, shared, _ = trained(train, rank, views=False)
        assert not shared
        weights, kept, shared, said = trained(train, rank, views=True)
        same = all(map(same_bits, plain, weights)) and repr(kept) == repr(plain_kept)
        found[train.__name__] = [same, shared, said]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("train", SAME)
def test_the_same_bits(train: Train, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        same, shared, said = of_rank[train.__name__]
        assert same and not said
        assert shared or train is accumulating  # which lets them go in the end


@pytest.mark.parametrize("train", REFUSED)
def test_what_would_change_a_number_ends_the_job(train: Train, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert REFUSED[train] in of_rank[train.__name__][2]


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_a_gradient_that_no_rank_adds_to(option: str) -> None:
    """It stays as it is in each rank, and would be averaged as a view."""
    assert grad_views._why_not({option: True}) == "some parameters may be unused in a pass"


@pytest.mark.parametrize(
    ("ranks", "reason"), [(1, ""), (8, ""), (6, "6 ranks are no power of two")]
)
def test_sums_over_a_power_of_two(ranks: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are divided before they are rounded or after, by whether a gradient is a view."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    assert grad_views._why_not({}) == reason


def test_ddp_s_own_mixed_precision() -> None:
    assert "mixed precision" in grad_views._why_not({"mixed_precision": object()})


def test_ddp_is_as_it_was_afterwards() -> None:
    before = DistributedDataParallel.__init__
    with GradViews():
        assert inspect.signature(DistributedDataParallel.__init__) == inspect.signature(before)
    assert DistributedDataParallel.__init__ is before


if __name__ == "__main__":
    run(work)
