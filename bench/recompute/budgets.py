"""Ours at the peaks that PyTorch's memory budget reaches, on the same models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from bench.recompute import convnets, inductor, ours, transformers
from bench.recompute.case import Training
from bench.recompute.inductor import Point
from bench.recompute.models import SEED
from bench.recompute.tracker import measure

GRAPHS: dict[str, tuple[str, Callable[[], Training]]] = {
    "gpt-2": (
        "3 layers of width 256, no dropout, 4096 words, 2 × 256 tokens",
        lambda: transformers.gpt2(2, 256, 3, 256, dropout=0.0),
    ),
    "llama": (
        "3 layers of width 256, 4 heads on 2, 4096 words, 2 × 256 tokens",
        lambda: transformers.llama(2, 256, 3, 256),
    ),
    "resnet-50": (
        "torchvision resnet50, 8 × 3 × 64 × 64",
        lambda: convnets.resnet("resnet50", 8, 64),
    ),
    "u-net": (
        "4 levels of 16 to 256 channels, batch norm, 16 classes, 2 × 3 × 96 × 96",
        lambda: convnets.unet(2, 96, 16, 4),
    ),
    "vit": (
        "3 layers of width 256, no dropout, 4 × 3 × 96 × 96 in patches of 8",
        lambda: transformers.vit(4, 96, 8, 3, 256, dropout=0.0),
    ),
}
SLACK = 0.005
"""Fraction by which a measured peak may miss what it is compared with: allocations of a few bytes
that one of the two sides does not make."""

PLANNED = 0.99
"""Of the slack, used when planning."""


def build(graph: str) -> Training:
    torch.manual_seed(SEED)
    training = GRAPHS[graph][1]()
    training.module.train()
    return training


def front(points: list[Point]) -> list[Point]:
    """The points that no other one beats, from the highest peak to the lowest."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.beyond_bytes, p.flops)):
        if not kept or point.flops < kept[-1].flops:
            kept.append(point)
    return kept[::-1]


def inversions(points: list[Point]) -> int:
    """How often the next lower budget of a solver gives a higher peak."""
    found = 0
    for solver in {point.solver for point in points}:
        chosen = sorted((p for p in points if p.solver == solver), key=lambda p: -p.budget)
        found += rises([point.beyond_bytes for point in chosen])
    return found


def rises(peaks: list[int]) -> int:
    """How many peaks are higher than the one before, as budgets fall."""
    return sum(after > before * (1 + SLACK) for before, after in itertools.pairwise(peaks))


def run(name: str) -> dict[str, Any]:
    """PyTorch's curve, and ours with each of its best peaks as the budget; JSON values."""
    training = build(name)
    training.step()
    training.module.zero_grad(set_to_none=True)
    plain_flops = inductor.flops(training.step)
    training.module.zero_grad(set_to_none=True)
    plain = measure(training.step, training.resident())
    points = inductor.curve(build(name))
    data: dict[str, Any] = {
        "says": GRAPHS[name][0],
        "solvers": inductor.solvers(),
        "eager_beyond_bytes": plain.beyond_bytes,
        "eager_flops": plain_flops,
        "pytorch": [_row(asdict(p), p.flops, plain_flops) for p in points],
        "pytorch_inversions": inversions(points),
    }
    rows = [_ours(name, point, plain_flops) for point in front(points)]
    peaks = [row["beyond_bytes"] for row in rows if "beyond_bytes" in row]
    data["memplan"] = {
        "rows": rows,
        "above": sum(not row["on_or_below"] for row in rows),
        "inversions": rises(peaks),
    }
    return data


def _row(row: dict[str, Any], flops: int, plain: int) -> dict[str, Any]:
    return {**row, "added_flops_fraction": flops / plain - 1}


def _ours(graph: str, rival: Point, plain_flops: int) -> dict[str, Any]:
    """Ours with the rival's measured peak as the budget of the whole step, for the least added
    FLOPs: what the rival's solver counts by default too."""
    training = build(graph)
    resident = training.resident()
    training.step()
    training.module.zero_grad(set_to_none=True)
    counted = [*training.module.parameters(), *training.module.buffers(), *training.inputs]
    base = measure(lambda: None, counted).base_bytes
    row: dict[str, Any] = {
        "budget_beyond_bytes": rival.beyond_bytes,
        "pytorch_added_flops_fraction": rival.flops / plain_flops - 1,
    }
    try:
        budget = base + int(rival.beyond_bytes * (1 + PLANNED * SLACK))
        ours.apply(training, budget, cost="flops")
    except Exception as error:  # what it says is the result: no plan for this budget
        return {**row, "failure": f"{type(error).__name__}: {error}", "on_or_below": False}
    training.step()  # the first one checks what is recomputed
    training.module.zero_grad(set_to_none=True)
    row["beyond_bytes"] = measure(training.step, resident).beyond_bytes
    training.module.zero_grad(set_to_none=True)
    total = inductor.flops(training.step)
    within = row["beyond_bytes"] <= rival.beyond_bytes * (1 + SLACK)
    row["on_or_below"] = within and total <= rival.flops
    return _row(row, total, plain_flops)
