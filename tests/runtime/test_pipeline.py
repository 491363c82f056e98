"""Recomputation in pipeline stages of two processes: the bits of every schedule stay."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from memplan.runtime.apply import AppliedEverywhere
from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart
from tests.runtime.harness import recomputations, same_bits
from tests.runtime.two_ranks import Block, found_by, run, weights

WIDTH, ROWS, MICRO_BATCHES, STEPS = 8, 3, 6, 3
SCHEDULES: dict[str, tuple[type, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
}
DROPPED = ["native_layer_norm", "addmm", "gelu", "native_dropout", "bernoulli_", "div_", "mul"]


def part(calls: int) -> RecomputePart:
    groups = [
        RecomputeGroup(f"{nth}", [OpOutput(f"aten.{op}.default", nth) for op in DROPPED])
        for nth in range(2)
    ]
    return RecomputePart(groups=groups, calls=calls)


def trained(name: str, rank: int, planned: bool) -> tuple[list[Tensor], int]:
    """Losses, gradients and weights, and how often was recomputed."""
    kind, per_rank = SCHEDULES[name]
    torch.manual_seed(rank)
    stages, models = [], []
    for number in range(per_rank):
        model = nn.Sequential(Block(WIDTH), nn.Dropout(0.5), Block(WIDTH))
        models.append(model)
        stages.append(PipelineStage(model, rank + 2 * number, 2 * per_rank, torch.device("cpu")))
    loss = nn.MSELoss()
    schedule: Any = kind(stages if per_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=loss)
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], 0.01)
    found: list[Tensor] = []
    calls = 2 if per_rank == 1 and rank == 1 else 1  # the loss is a module
    lever = AppliedEverywhere(part(calls)) if planned else nullcontext()
    with lever, recomputations() as groups:
        for _ in range(STEPS):
            batch = torch.randn(ROWS * MICRO_BATCHES, WIDTH)
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch, losses=losses)
            found += [one.detach() for one in losses]
            for model in models:
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(one.clone() for model in models for one in weights(model))], len(groups)


def work(rank: int) -> dict[str, Any]:
    found = {}
    for name in SCHEDULES:
        plain, _ = trained(name, rank, False)
        planned, recomputed = trained(name, rank, True)
        same = len(plain) == len(planned) and all(map(same_bits, plain, planned))
        found[name] = [same, len(plain), recomputed]
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_bits(name: str, found: list[dict[str, Any]]) -> None:
    _, per_rank = SCHEDULES[name]
    for of_rank in found:
        same, count, recomputed = of_rank[name]
        assert same
        assert count >= 12 * per_rank * (STEPS + 1)
        # Each group of every pass; a stage may try itself out before its first step.
        assert 0 <= recomputed - 2 * per_rank * STEPS * MICRO_BATCHES <= 2 * per_rank


if __name__ == "__main__":
    run(work)
