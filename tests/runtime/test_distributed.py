"""Offload, recomputation and optimizers' state, on the host or in 8 bits, in jobs of two processes:
DDP, FSDP2, tensor parallel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import memplan.runtime.host_state.in_effect as in_effect
import memplan.runtime.host_state.ring as ring
from memplan.runtime.apply import AppliedEverywhere
from memplan.runtime.host_state import HostState
from memplan.runtime.low_bit import LowBit
from memplan.runtime.tape import Offload
from memplan.types.plan import OffloadPart, OpOutput, RecomputeGroup, RecomputePart, StatePart
from tests.runtime.harness import recomputations, same_bits
from tests.runtime.two_ranks import KINDS, found_by, parallel, run, seed_batches, weights

OPS = ["native_layer_norm", "addmm", "gelu", "mm", "view"]
PLACES = [OpOutput(f"aten.{op}.default", nth) for op in OPS for nth in range(8)]
GELUS = [place for place in PLACES if "gelu" in place.op]
NORMS = [place for place in PLACES if "norm" in place.op]
OTHERS = [place for place in PLACES if "gelu" not in place.op]


def offload(values: list[OpOutput]) -> OffloadPart:
    return OffloadPart(values=values[::-1], out_bytes=1000, ahead_bytes=2000)


WAYS: dict[str, tuple[RecomputePart | None, OffloadPart]] = {
    "offload": (None, offload(PLACES)),
    "both": (RecomputePart(groups=[RecomputeGroup("gelu", GELUS)]), offload(OTHERS)),
    # FSDP2 has gathered the weights of one block at a time.
    "across blocks": (RecomputePart(groups=[RecomputeGroup("norms", NORMS)]), offload(GELUS)),
}


def trained(kind: str, way: str | None, rank: int) -> tuple[list[Tensor], int, int]:
    """Losses and weights, how many values went to the host, and how often was recomputed."""
    model, _ = parallel(kind, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    seed_batches(kind, rank)
    losses: list[Tensor] = []
    sent: list[bool] = []
    offload_class: Any = Offload
    plain_send = offload_class.send

    def send(*arguments: Any) -> bool:
        sent.append(plain_send(*arguments))
        return sent[-1]

    parts = WAYS[way] if way else (None, None)
    lever: Any = nullcontext()
    if way:
        lever = AppliedEverywhere(parts[0], offload=parts[1], devices=("cpu",))
    offload_class.send = send
    with lever, recomputations() as groups:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(4, (6,)))
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
    offload_class.send = plain_send
    return [*losses, *weights(model)], sum(sent), len(groups)


def stepped(kind: str, lever: HostState | None, rank: int) -> tuple[list[Tensor], set[str], int]:
    """Weights, and the optimizer's state after it was saved and loaded; what holds its moments;
    of how many parameters it is streamed."""
    model, _ = parallel(kind, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True)
    seed_batches(kind, rank)
    with lever or nullcontext():
        for step in range(4):
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
    of_each = [optimizer.state[one] for one in model.parameters()]
    state: list[Any] = [of[name] for of in of_each for name in sorted(of)]
    local = [getattr(one, "_local_tensor", one) for one in state]
    streams = len(lever._chosen[optimizer]) if lever is not None else 0
    return [*weights(model), *local], {type(one).__name__ for one in state}, streams


def in_8_bits(kind: str, lever: LowBit | None, rank: int) -> tuple[float, list[str], float]:
    """The last loss, what holds the moments of this rank, and its weights' sum."""
    dtype = torch.bfloat16 if kind == "ddp" else torch.float32
    model, _ = parallel(kind, 2, 64, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    seed_batches(kind, rank)
    with lever or nullcontext():
        for step in range(8):
            loss = model(torch.randn(32, 64, dtype=dtype)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
    moments: list[Any] = [state["exp_avg"] for state in optimizer.state.values()]
    kinds = [type(getattr(one, "_local_tensor", one)).__name__ for one in moments]
    return loss.item(), kinds, sum(one.double().sum().item() for one in weights(model))


def work(rank: int) -> dict[str, Any]:
    in_effect._SMALLEST, ring.ELEMENTS = 50, 100
    compiles: Any = torch
    compiles.compile = lambda function, **_options: function
    found: dict[str, Any] = {}
    for kind in KINDS:
        plain_loss, _, _ = in_8_bits(kind, None, rank)
        found[f"{kind}: 8 bits"] = [plain_loss, *in_8_bits(kind, LowBit(), rank)]
        lever = HostState(StatePart(share=1), devices=("cpu",))
        plain, plain_kinds, _ = stepped(kind, None, rank)
        streamed, kinds, streams = stepped(kind, lever, rank)
        same = len(plain) == len(streamed) and all(map(same_bits, plain, streamed))
        found[f"{kind}: state"] = [same and plain_kinds == kinds, streams]
        plain, _, _ = trained(kind, None, rank)
        for way in WAYS:
            planned, sent, recomputed = trained(kind, way, rank)
            found[f"{kind}: {way}"] = [all(map(same_bits, plain, planned)), sent, recomputed]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(kind: str, way: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        same, sent, recomputed = of_rank[f"{kind}: {way}"]
        assert same
        assert sent >= 6 * 3  # in each of six passes
        assert bool(recomputed) == (way != "offload")


@pytest.mark.parametrize("kind", KINDS)
def test_state_on_the_host(kind: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        same, streams = of_rank[f"{kind}: state"]
        assert same
        assert streams >= 4  # both products of both blocks


@pytest.mark.parametrize("kind", KINDS)
def test_state_in_8_bits(kind: str, found: list[dict[str, Any]]) -> None:
    results = [of_rank[f"{kind}: 8 bits"] for of_rank in found]
    for plain, loss, kinds, _ in results:
        assert loss == pytest.approx(plain, rel=0.1)
        assert kinds.count("OptimState8bit") == 4  # both products of both blocks
    if kind == "ddp":
        assert results[0][-1] == results[1][-1], "both have the same weights, in bf16"


if __name__ == "__main__":
    run(work)
