"""The three-way choice against every plan there is, and against the simple ways."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from memplan.recompute.evaluate import evaluate
from memplan.recompute.offload import Link, to_offload_part
from memplan.recompute.selection import Selection
from memplan.recompute.solve import Solver
from memplan.recompute.transfers import OffloadPlan, without_offloaded
from memplan.types.solution import Solved, TimedOut
from memplan.types.step_graph import StepGraph
from tests.oracles.exhaustive_offload import best_plans, least_seconds
from tests.recompute.graphs import chain, llama, residual_blocks, unet
from tests.recompute.offloads import evaluate_offload, in_order, solve

PLENTY = 60.0


def small(seed: int) -> tuple[StepGraph, float]:
    rng = random.Random(seed)
    made = [chain(rng, rng.randint(4, 6)), residual_blocks(rng, 1), unet(rng, 1)]
    return rng.choice([g for g in made if g.values.droppable.sum() <= 6]), rng.choice([1, 2, 8])


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all_plans(seed: int) -> None:
    graph, rate = small(seed)
    plans = best_plans(graph, rate)
    plain = evaluate(graph, Selection()).peak_bytes
    for share in (0.0, 0.4, 0.8):
        budget = int(plans[0][0] + share * (plain - plans[0][0]))
        found = solve(graph, budget, Link(rate), deadline_seconds=PLENTY)
        assert isinstance(found, Solved)
        assert found.cost == pytest.approx(least_seconds(plans, budget))
        assert found.bound <= least_seconds(plans, budget) + 1e-9


@pytest.mark.parametrize("saved", [0, 1])
def test_a_step_that_saves_next_to_nothing(saved: int) -> None:
    graph = chain(random.Random(0), 4)
    kept = np.flatnonzero(graph.values.droppable)[saved:]
    droppable = graph.values.droppable.copy()
    droppable[kept] = False
    graph = replace(graph, values=replace(graph.values, droppable=droppable))
    plain = evaluate(graph, Selection()).peak_bytes
    found = solve(graph, plain - 1, Link(1), deadline_seconds=PLENTY)
    assert isinstance(found, Solved | TimedOut)
    if isinstance(found, Solved):
        assert evaluate_offload(graph, found.solution, 1).peak_bytes < plain


@pytest.mark.parametrize("seed", range(4))
def test_what_only_the_host_can_take_is_never_recomputed(seed: int) -> None:
    """As what a checkpoint of the script's own keeps between two of its blocks."""
    graph, rate = small(seed)
    between = np.flatnonzero(graph.values.droppable)[::2]
    droppable = graph.values.droppable.copy()
    droppable[between] = False
    values = replace(graph.values, droppable=droppable)
    graph = replace(graph, values=values, between=frozenset(between.tolist()))
    plain = evaluate(graph, Selection()).peak_bytes
    for budget in (1, plain // 2, plain - 1):
        found = solve(graph, budget, Link(rate), deadline_seconds=PLENTY)
        if isinstance(found, Solved):
            dropped = frozenset().union(*found.solution.selection.groups)
            assert dropped.isdisjoint(between.tolist())


def test_both_are_better_than_either() -> None:
    graph = replace(llama(3), rest_peak_bytes=0)
    plain = evaluate(graph, Selection()).peak_bytes
    budget = graph.base_bytes + int(0.75 * (plain - graph.base_bytes))
    link = Link(25e9)
    both = solve(graph, budget, link, deadline_seconds=PLENTY)
    dropping = Solver().solve(graph, budget, deadline_seconds=PLENTY)
    moving = in_order(graph, budget, link)
    assert isinstance(both, Solved) and isinstance(dropping, Solved)
    assert both.cost < 0.9 * dropping.cost
    assert moving is None or both.cost < moving.added_seconds
    judged = evaluate_offload(graph, both.solution, link.bytes_per_second)
    assert judged.peak_bytes <= budget
    assert judged.added_seconds == pytest.approx(both.cost)


def test_the_host_s_memory_is_bounded() -> None:
    graph = replace(llama(4), rest_peak_bytes=0)
    plain = evaluate(graph, Selection()).peak_bytes
    budget = graph.base_bytes + int(0.75 * (plain - graph.base_bytes))
    free = solve(graph, budget, Link(25e9), deadline_seconds=PLENTY)
    assert isinstance(free, Solved)
    used = evaluate_offload(graph, free.solution, 25e9).host_bytes
    tight = solve(graph, budget, Link(25e9, host_bytes=used // 2), deadline_seconds=PLENTY)
    assert isinstance(tight, Solved)
    assert 0 < evaluate_offload(graph, tight.solution, 25e9).host_bytes <= used // 2


def test_what_is_offloaded_is_missing_in_the_other_graph() -> None:
    graph = replace(llama(3), rest_peak_bytes=0)
    saved = np.flatnonzero(graph.values.droppable)[:20].tolist()
    judged = evaluate_offload(graph, OffloadPlan(Selection(), frozenset(saved), 0, 0), 25e9)
    other = without_offloaded(graph, judged)
    other.check()
    assert judged.away
    assert evaluate(other, Selection()).peak_bytes == judged.peak_bytes
    assert not other.values.droppable[saved].any()


def test_a_plan_lists_values_in_the_order_of_need() -> None:
    graph = llama(2)
    saved = np.flatnonzero(graph.values.droppable).tolist()
    plan = OffloadPlan(Selection((frozenset(saved[3:6]),)), frozenset(saved[6:12]), 5, 7)
    part = to_offload_part(graph, evaluate_offload(graph, plan, 25e9), Link(25e9))
    assert (part.out_bytes, part.ahead_bytes) == (5, 7)
    assert part.host_bytes == graph.values.bytes[saved[6:12]].sum()
    rows = [graph.ops.name.index(one.op) for one in part.values]
    assert len(rows) == 6 and part.values[0].nth >= part.values[-1].nth
