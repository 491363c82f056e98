"""The optimizer in backward in jobs of two processes: FSDP2 and tensor parallel have the same bits,
DDP is left alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memplan.runtime.host_state.in_effect as in_effect
import memplan.runtime.host_state.ring as ring
from memplan.runtime.host_state import HostState
from memplan.runtime.in_effect import plan_in_effect
from memplan.types.errors import OptimizerInBackwardError
from memplan.types.plan import OrderPart, Plan, StatePart
from tests.runtime.two_ranks import KINDS, found_by, parallel, run, seed_batches, weights

MAKES: dict[str, Any] = {
    "adamw": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "sgd": lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
}


def trained(
    kind: str,
    make: str,
    rank: int,
    *,
    planned: bool,
    from_first: bool = True,
    clips: bool = False,
    on_host: HostState | None = None,
) -> tuple[list[Tensor], Any, list[str]]:
    """Weights and state, what came of the plan, and what was said."""
    said: list[str] = []
    order = OrderPart(parameters=20, gradient_bytes=0, from_first=from_first)
    plan = plan_in_effect(Plan(order=order), [], lambda _part, text: said.append(text))
    with plan if planned else nullcontext() as found, on_host or nullcontext():
        model, _ = parallel(kind, 2, classes=1)  # one rank has nothing of its bias under FSDP2
        optimizer = MAKES[make](model.parameters())
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seed_batches(kind, rank)
        for step in range(4):
            model(torch.randn(6, 8)).square().mean().backward()
            if clips and step == 2:
                nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=False)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
    of_each = [optimizer.state[one] for one in model.parameters()]
    state: list[Any] = [of[name] for of in of_each for name in sorted(of)]
    tensors = [getattr(one, "_local_tensor", one) for one in state if isinstance(one, Tensor)]
    return [*weights(model), *tensors], found and found.in_backward, said


def work(rank: int) -> dict[str, Any]:
    in_effect._SMALLEST, ring.ELEMENTS = 50, 100
    found: dict[str, Any] = {}
    for kind in KINDS:
        for make in MAKES:
            plain, _, _ = trained(kind, make, rank, planned=False)
            planned, came, said = trained(kind, make, rank, planned=True)
            same = len(plain) == len(planned) and all(map(torch.equal, plain, planned))
            found[f"{kind}: {make}"] = [same, came.steps, came.parameters, said]
            on_host = HostState(StatePart(share=1), devices=("cpu",))
            streamed, came, said = trained(kind, make, rank, planned=True, on_host=on_host)
            same = len(plain) == len(streamed) and all(map(torch.equal, plain, streamed))
            found[f"{kind}: {make}, state on the host"] = [same, came.steps, 14, said]
        _, came, said = trained(kind, "sgd", rank, planned=True, from_first=False)
        found[f"{kind}: watched"] = [came.steps, said]
        try:
            trained(kind, "sgd", rank, planned=True, clips=True)
            found[f"{kind}: clips"] = ""
        except OptimizerInBackwardError as error:
            found[f"{kind}: clips"] = error.message
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [*MAKES, *(f"{make}, state on the host" for make in MAKES)])
def test_the_same_bits(kind: str, make: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        same, steps, parameters, said = of_rank[f"{kind}: {make}"]
        assert same
        if kind == "ddp":
            assert not steps and "sums gradients over ranks" in said[0]
        else:
            assert steps == 4 and parameters == 14, said


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_step_is_not_watched(kind: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        steps, said = of_rank[f"{kind}: watched"]
        assert not steps and len(said) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_a_gradient_later_ends_the_job(kind: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        message = of_rank[f"{kind}: clips"]
        assert ("asks for a gradient" in message) == (kind != "ddp")


if __name__ == "__main__":
    run(work)
