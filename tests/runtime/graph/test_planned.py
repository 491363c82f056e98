"""A plan's choices inside graphs that plain `torch.compile` makes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.recompute.tracker import measure
from memplan.runtime.graph.inductor import uncached
from memplan.runtime.graph.planned import PlannedRegions
from memplan.types.plan import CompiledRegion, RegionsPart


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def run(
    part: RegionsPart | None, blocks: int = 3
) -> tuple[list[float], int, list[CompiledRegion], list[str]]:
    """Losses, the peak of a step, what was done and said."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(blocks)])
    x = torch.randn(1024, 16)
    compiled: Any = torch.compile(model)
    losses, regions, notes = [], list[CompiledRegion](), list[str]()

    def step() -> None:
        loss = compiled(x).square().mean()
        loss.backward()
        losses.append(loss.item())

    with uncached():
        if part is None:
            step()
        else:
            with PlannedRegions(part, notes.append, regions.append):
                step()
    model.zero_grad()
    gc.collect()
    return losses, measure(step, [*model.parameters(), x]).peak_bytes, regions, notes


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], int]:
    losses, peak, _, _ = run(None)
    return losses, peak


@pytest.fixture(scope="module")
def least() -> RegionsPart:
    """What a capture with the largest share chooses."""
    _, _, regions, _ = run(RegionsPart(share=1.0))
    return RegionsPart(regions=regions)


def test_a_region_of_a_plan_needs_less(plain: tuple[list[float], int], least: RegionsPart) -> None:
    losses, peak, regions, notes = run(least)
    assert regions == least.regions and not notes
    assert regions[0].recomputed and regions[0].name.startswith(
        "tests/runtime/graph/test_planned.py"
    )
    assert peak < 0.8 * plain[1]
    assert losses == pytest.approx(plain[0], rel=1e-5)


def test_another_graph_runs_as_without_a_plan(least: RegionsPart) -> None:
    torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] += 1  # of an earlier graph
    _, peak, regions, notes = run(least, blocks=2)
    assert not regions
    assert "not one of the plan's" in notes[0] and "1 of the 1 compiled graphs" in notes[1]
    assert peak == run(None, blocks=2)[1]


def test_a_damaged_plan_costs_memory_and_no_number(
    plain: tuple[list[float], int],
    least: RegionsPart,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (region,) = least.regions
    names = ["no_such_node", *region.recomputed[::2]]
    damaged = CompiledRegion(region.graph, region.name, names)
    losses, peak, _, notes = run(RegionsPart(regions=[damaged]))
    assert "cannot run with this plan" in notes[0]
    assert (losses, peak) == plain
    assert not list(tmp_path.iterdir())  # PyTorch would write down what it found no partition of
