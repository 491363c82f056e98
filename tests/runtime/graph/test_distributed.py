"""Compiled regions and steps of two processes: DDP, FSDP2, tensor parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import memplan
from memplan.runtime.graph.inductor import unavailable
from tests.runtime.two_ranks import KINDS, found_by, parallel, run, seed_batches, weights

EAGER: dict[str, Any] = {"codegen": "eager", "deadline_seconds": 0.2}
FUSED: dict[str, Any] = {**EAGER, "codegen": "inductor"}
WAYS: dict[str, dict[str, Any] | None] = {
    "a graph": EAGER,
    "a graph, least": {**EAGER, "budget": "least"},
    "blocks": EAGER,
    "blocks, least": {**EAGER, "budget": "least"},
    "a step": None,
}
FUSED_WAYS: dict[str, dict[str, Any] | None] = {
    "a fused graph, least": {**FUSED, "budget": "least"},
    "fused blocks": FUSED,
}
FUSED_WAY = {
    "ddp": "a fused graph, least",
    "fsdp": "fused blocks",
    "tensor parallel": "a fused graph, least",
}
"""One of each kind: kernels take long to make, and both ways are held to bits without them."""


def trained(kind: str, way: str | None, rank: int, count: int) -> tuple[list[Tensor], str]:
    """Losses and weights after three steps, and why a step runs plainly."""
    torch._dynamo.reset()
    model, blocks = parallel(kind, count)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    run: Any = model
    if way is not None and way != "a step":
        chosen = {**WAYS, **FUSED_WAYS}[way]
        options: Any = {"backend": "memplan", "options": chosen, "dynamic": False}
        if "blocks" in way:
            for block in blocks:
                block.compile(**options)
        else:
            run = torch.compile(model, **options)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(run(x), y)

    step = memplan.compile(loss_fn, optimizer=optimizer, order=False) if way == "a step" else None
    seed_batches(kind, rank)
    losses = []
    for _ in range(3):
        x, y = torch.randn(6, 8), torch.randint(4, (6,))
        if step is not None:
            losses.append(step(x, y))
            continue
        optimizer.zero_grad()
        loss = loss_fn(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    reason = "" if step is None else step.report().fallback
    return [*losses, *weights(model)], reason


def blocks_of(way: str) -> int:
    """A search for the least compiles each graph several times, which takes long."""
    return 1 if way.endswith("least") else 2


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        plain = [trained(kind, None, rank, count)[0] for count in (1, 2)]
        for way in WAYS:
            compiled, reason = trained(kind, way, rank, blocks_of(way))
            same = all(map(torch.equal, plain[blocks_of(way) - 1], compiled))
            found[f"{kind}: {way}"] = [same, reason]
        if not unavailable([torch.device("cpu")]):
            way = FUSED_WAY[kind]
            fused, _ = trained(kind, way, rank, blocks_of(way))
            found[f"{kind}: {way}"] = [all(map(close, plain[blocks_of(way) - 1], fused)), ""]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_those_of_the_same_without_compile(
    kind: str, way: str, found: list[dict[str, Any]]
) -> None:
    for of_rank in found:
        same, reason = of_rank[f"{kind}: {way}"]
        assert same
        assert bool(reason) == (way == "a step")


@pytest.mark.skipif(bool(unavailable([torch.device("cpu")])), reason="no C++ compiler")
@pytest.mark.parametrize(("kind", "way"), FUSED_WAY.items())
def test_fused_kernels_give_the_numbers_of_the_same_without_compile(
    kind: str, way: str, found: list[dict[str, Any]]
) -> None:
    assert all(of_rank[f"{kind}: {way}"][0] for of_rank in found)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ddp", "Logger|DistributedDataParallel"),
        ("fsdp", "DTensor"),
        ("tensor parallel", "DTensor"),
    ],
)
def test_a_step_says_why_it_runs_plainly(
    kind: str, words: str, found: list[dict[str, Any]]
) -> None:
    """Gradients that are reduced between ranks must not be lost."""
    reason = found[0][f"{kind}: a step"][1]
    assert any(word in reason for word in words.split("|")), reason


if __name__ == "__main__":
    run(work)
