"""Micro-batches in flight on a pipeline stage, planned as one pass: what a capture with the plan in
effect holds is what the plan says."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining._utils import _TensorMeta

from memplan.capturing.distributed import peers
from memplan.capturing.enough import EnoughSeen
from memplan.capturing.session import CaptureSession
from memplan.phases import plain_peak, step_graph
from memplan.phases.passes import alive_after
from memplan.recompute.evaluate import evaluate
from memplan.recompute.selection import to_part
from memplan.recompute.solve import Solver
from memplan.runtime.apply import AppliedEverywhere
from memplan.types.plan import RecomputePart
from memplan.types.step_graph import StepGraph
from memplan.types.trace import Trace
from tests.capturing.distributed.ranks import join, options

pytestmark = pytest.mark.usefixtures("short_searches")

RANKS, MICRO_BATCHES, ROWS, WIDTH = 4, 8, 64, 128


@pytest.fixture(autouse=True)
def one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are replayed have a workspace of cuBLASLt in backward's thread, too."""
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + self.dropout(y)


def stage(blocks: int = 3) -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(blocks)])


def train(kind: type, per_rank: int, unlike: bool) -> None:
    join()
    rank, parts = dist.get_rank(), RANKS * per_rank
    device = torch.device("cuda", torch.cuda.current_device())
    own = [rank + RANKS * number for number in range(per_rank)]
    models, stages = [], []
    for number, index in enumerate(own):
        models.append(stage(3 + number * unlike).to(device))
        stages.append(PipelineStage(models[-1], index, parts, device))
    schedule: Any = kind(stages if per_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    for _ in range(4):
        batch = torch.randn(ROWS * MICRO_BATCHES, WIDTH, device=device)
        schedule.step(
            *([batch] if 0 in own else []), **({"target": batch} if parts - 1 in own else {})
        )
        optimizer.step()
        optimizer.zero_grad()


def captured(
    kind: type,
    rank: int,
    per_rank: int = 1,
    part: RecomputePart | None = None,
    unlike: bool = False,
) -> Trace:
    received = _TensorMeta(torch.Size([ROWS, WIDTH]), (WIDTH, 1), torch.float32, True)
    others = peers.current().known  # what the ranks before this one would be asked for
    others.update({f"stage {stage}": (received,) for stage in range(1, RANKS * per_rank)})
    with CaptureSession(options(rank, RANKS)) as session, AppliedEverywhere(part):
        with suppress(EnoughSeen):
            train(kind, per_rank, unlike)
        return session.trace()


@cache
def plain(kind: type, rank: int, per_rank: int) -> tuple[Trace, StepGraph]:
    trace = captured(kind, rank, per_rank)
    return trace, step_graph(trace)


CASES = [
    (ScheduleGPipe, 0, 1, 1.0),
    (ScheduleGPipe, RANKS - 1, 1, 0.6),
    (Schedule1F1B, 0, 1, 1.0),
    (Schedule1F1B, 1, 1, 0.6),
    (ScheduleInterleaved1F1B, 1, 2, 1.0),
]
"""With how far to go from the plain peak to the least."""


@pytest.mark.parametrize(("kind", "rank", "per_rank"), [case[:3] for case in CASES])
def test_passes_in_flight_are_counted(kind: type, rank: int, per_rank: int) -> None:
    trace, graph = plain(kind, rank, per_rank)
    assert graph.passes == MICRO_BATCHES * per_rank
    if kind is ScheduleGPipe:
        # The first backward has all beside it, the second all gradients and one less.
        assert graph.others in (MICRO_BATCHES - 1, MICRO_BATCHES - 2)
    elif kind is Schedule1F1B:
        assert graph.others == RANKS - rank - 1
    assert graph.others >= 1
    peak, planned = int(alive_after(trace).max()), plain_peak(graph)
    if kind is ScheduleGPipe:  # whose first backward finds no gradients of an earlier one
        gradients = sum(4 * parameter.numel() for parameter in stage().parameters())
        assert peak <= planned <= peak + 1.01 * gradients
    else:
        assert planned == pytest.approx(peak, rel=0.002)


@pytest.mark.parametrize(("kind", "rank", "per_rank", "share"), CASES)
def test_a_plan_holds_what_it_promises(kind: type, rank: int, per_rank: int, share: float) -> None:
    trace, graph = plain(kind, rank, per_rank)
    solver, most = Solver(), plain_peak(graph)
    lowest = evaluate(graph, solver.least_peak(graph, deadline_seconds=1).solution).peak_bytes
    found: Any = solver.solve(graph, int(most - share * (most - lowest)), deadline_seconds=2)
    judged = evaluate(graph, found.solution)
    part = to_part(
        graph,
        found.solution,
        budget_bytes=0,
        peak_bytes=judged.peak_bytes,
        added_seconds=judged.added_seconds,
    )
    assert part.calls == (2 if kind is ScheduleGPipe and rank == RANKS - 1 else 1)
    after = captured(kind, rank, per_rank, part)
    peak = int(alive_after(after).max())
    assert peak < int(alive_after(trace).max())
    assert peak == pytest.approx(judged.peak_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "unlike"), [(ScheduleInterleaved1F1B, True), (ScheduleInterleavedZeroBubble, False)]
)
def test_unlike_stages_and_backwards_in_parts_are_not_planned(kind: type, unlike: bool) -> None:
    graph = step_graph(captured(kind, 1, 2, unlike=unlike))
    assert not graph.others
