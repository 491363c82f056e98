"""The two clocks of a step against an oracle that plays it op by op and copy by copy."""

from __future__ import annotations

import random

import pytest

from memplan.recompute.selection import Selection
from memplan.recompute.transfers import OffloadPlan, Saves
from memplan.types.step_graph import StepGraph
from tests.oracles.played_offload import play
from tests.recompute.graphs import (
    arbitrary_graph,
    arbitrary_selection,
    chain,
    residual_blocks,
    unet,
)
from tests.recompute.offloads import evaluate_offload


def arbitrary_plan(rng: random.Random, graph: StepGraph) -> OffloadPlan:
    selection = arbitrary_selection(rng, graph) if rng.random() < 0.7 else Selection()
    can = [v for v in Saves(graph, 1.0).values if v not in selection.dropped]
    offloaded = frozenset(v for v in can if rng.random() < 0.6)
    top = int(graph.values.bytes.max(initial=1))
    window = lambda: rng.choice([0, rng.randint(0, 3 * top)])  # noqa: E731
    return OffloadPlan(selection, offloaded, window(), window())


@pytest.mark.parametrize("seed", range(60))
def test_the_clocks_agree_with_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    graphs = [
        arbitrary_graph(rng, rng.randint(2, 10), rng.randint(2, 10)),
        chain(rng, rng.randint(3, 9)),
        residual_blocks(rng, 2),
        unet(rng, 2),
    ]
    for graph in graphs:
        for _ in range(4):
            plan = arbitrary_plan(rng, graph)
            rate = rng.choice([0.5, 2.0, 5.0, 50.0])
            judged = evaluate_offload(graph, plan, rate)
            peak, added = play(graph, plan, rate)
            assert judged.peak_bytes == peak, plan
            assert judged.added_seconds == pytest.approx(added, abs=1e-9), plan
