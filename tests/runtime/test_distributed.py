"""Offload and recomputation in jobs of two processes: DDP, FSDP2, tensor parallel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from memplan.runtime.apply import AppliedEverywhere
from memplan.runtime.tape import Offload
from memplan.types.plan import OffloadPart, OpOutput, RecomputeGroup, RecomputePart
from tests.runtime.harness import recomputations, same_bits
from tests.runtime.two_ranks import KINDS, found_by, parallel, run, seed_batches, weights

OPS = ["native_layer_norm", "addmm", "gelu", "mm", "view"]
PLACES = [OpOutput(f"aten.{op}.default", nth) for op in OPS for nth in range(8)]
GELUS = [place for place in PLACES if "gelu" in place.op]
OTHERS = [place for place in PLACES if "gelu" not in place.op]


def offload(values: list[OpOutput]) -> OffloadPart:
    return OffloadPart(values=values[::-1], out_bytes=1000, ahead_bytes=2000)


WAYS: dict[str, tuple[RecomputePart | None, OffloadPart]] = {
    "offload": (None, offload(PLACES)),
    "both": (RecomputePart(groups=[RecomputeGroup("gelu", GELUS)]), offload(OTHERS)),
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


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
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
        assert sent > 6 * 3  # in each of six passes
        assert bool(recomputed) == (way == "both")


if __name__ == "__main__":
    run(work)
