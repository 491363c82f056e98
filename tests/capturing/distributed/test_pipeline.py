"""Micro-batches in flight on a pipeline stage: as many as its schedule says."""

from __future__ import annotations

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
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._utils import _TensorMeta

from memplan.capturing.distributed import peers
from memplan.capturing.session import CaptureSession
from memplan.types.trace import EventKind, Trace
from tests.capturing.distributed.ranks import join, options

RANKS, MICRO_BATCHES, ROWS, WIDTH = 4, 8, 3, 320
MASK = ROWS * WIDTH
"""Bytes of a dropout's mask: saved for the backward pass, and nothing else is as large."""


def stages_of(rank: int, count: int, *, folded: bool) -> list[int]:
    """Folded as a V: the first and the last stage on the same rank."""
    if folded:
        return [rank, 2 * RANKS - 1 - rank]
    return [rank + RANKS * i for i in range(count)]


def run(kind: type, per_rank: int, *, folded: bool = False) -> tuple[Any, list[int]]:
    join()
    rank, parts = dist.get_rank(), RANKS * per_rank
    device = torch.device("cuda", torch.cuda.current_device())
    own = stages_of(rank, per_rank, folded=folded)
    stages = []
    for index in own:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(device)
        stages.append(PipelineStage(model, index, parts, device))
    loss = nn.functional.mse_loss
    schedule = kind(stages if per_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=loss)
    batch = torch.randn(ROWS * MICRO_BATCHES, WIDTH, device=device)
    first = [batch] if 0 in own else []
    last = {"target": batch} if parts - 1 in own else {}
    schedule.step(*first, **last)
    return schedule, own


def captured(kind: type, per_rank: int, rank: int, *, folded: bool = False) -> tuple[Trace, Any]:
    received = _TensorMeta(torch.Size([ROWS, WIDTH]), (WIDTH, 1), torch.float32, True)
    others = peers.current().known  # what the ranks before this one would be asked for
    others.update({f"stage {stage}": (received,) for stage in range(1, RANKS * per_rank)})
    with CaptureSession(options(rank, RANKS, steps=10)) as session:
        schedule, _ = run(kind, per_rank, folded=folded)
        order = getattr(schedule, "pipeline_order", {}).get(rank)
        trace = session.trace()
    return trace, order


def most_masks(trace: Trace) -> int:
    live: set[int] = set()
    most = 0
    for event in trace:
        if event.kind == EventKind.ALLOC and event.bytes == MASK:
            live.add(event.storage)
        elif event.kind == EventKind.FREE:
            live.discard(event.storage)
        most = max(most, len(live))
    return most


def most_in_flight(order: list[Any]) -> int:
    """Of a schedule's own list: forward passes whose backward pass is still to come.

    Where it is in two parts, the first, towards the inputs, lets go of a mask. The first stage's
    inputs want no gradient, so all is done in the second.
    """
    ahead = most = 0
    for action in filter(None, order):
        kind = action.computation_type.name
        last = "BACKWARD_WEIGHT" if action.stage_index == 0 else "BACKWARD_INPUT"
        ahead += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", last))
        most = max(most, ahead)
    return most


@pytest.mark.parametrize("rank", [0, 2, RANKS - 1])
def test_one_forward_one_backward_keeps_fewer_the_later_the_stage(rank: int) -> None:
    trace, _ = captured(Schedule1F1B, 1, rank)
    assert most_masks(trace) == RANKS - rank


def test_gpipe_keeps_every_micro_batch() -> None:
    trace, _ = captured(ScheduleGPipe, 1, RANKS - 1)
    assert most_masks(trace) == MICRO_BATCHES


@pytest.mark.parametrize("rank", [0, RANKS - 1])
@pytest.mark.parametrize(
    "kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble]
)
def test_schedules_of_several_stages_keep_what_their_lists_say(kind: type, rank: int) -> None:
    trace, order = captured(kind, 2, rank, folded=kind is ScheduleZBVZeroBubble)
    assert most_masks(trace) == most_in_flight(order)
    assert 1 < most_in_flight(order) < 2 * MICRO_BATCHES
