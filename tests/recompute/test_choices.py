"""The choices that budgets are looked up in, and what each runs again."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memplan.recompute import planner
from memplan.recompute.evaluate import evaluate
from memplan.recompute.frontier import Choice, choices
from memplan.recompute.replays import replays
from memplan.recompute.selection import Selection
from memplan.types.step_graph import StepGraph
from tests.oracles.played_selection import evaluate_slowly
from tests.recompute.graphs import arbitrary_graph, arbitrary_selection, chain, llama, unet


def with_flops(graph: StepGraph) -> StepGraph:
    """Half of the ops have some."""
    flops = np.array([row % 2 * int(1e6 * s) for row, s in enumerate(graph.ops.seconds)], np.int64)
    return replace(graph, ops=replace(graph.ops, flops=flops))


def writes_only_what_it_makes(graph: StepGraph) -> bool:
    return all(
        graph.values.alloc[value] == row
        for row in range(len(graph))
        for value in graph.ops.writes_of(row)
        if graph.ops.replayable[row]
    )


def test_replays_are_those_that_are_evaluated() -> None:
    looked_at = 0
    for seed in (*range(400), 3705):  # the last drops what an op that is not replayed changed
        rng = random.Random(seed)
        graph = arbitrary_graph(rng, 7, 6) if seed % 2 else chain(rng, 4)
        if not writes_only_what_it_makes(graph):
            continue
        selection = arbitrary_selection(rng, graph)
        found, slow = replays(graph, selection), evaluate_slowly(graph, selection)
        seconds = sum(float(graph.ops.seconds[row]) for one in found for row in one.rows)
        assert sum(len(one.rows) for one in found) == slow.replayed_ops
        assert seconds * graph.passes == pytest.approx(slow.added_seconds)
        assert all(one.gives <= one.makes for one in found)
        looked_at += bool(found)
    assert looked_at > 50


@pytest.mark.parametrize("make", [lambda: unet(random.Random(1), 3), lambda: llama(2)])
def test_choices_rise_in_work_and_fall_in_bytes(make: Any) -> None:
    graph = with_flops(make())
    found = choices(graph)
    assert found[0].selection == Selection()
    assert len(found) > 3
    for one, next_one in itertools.pairwise(found):
        assert (one.flops, one.cost) <= (next_one.flops, next_one.cost)
        assert one.peak_bytes > next_one.peak_bytes
    for one in found:
        judged = evaluate(graph, one.selection)
        assert (judged.peak_bytes, judged.added_seconds) == (one.peak_bytes, one.cost)
        rows = [row for again in replays(graph, one.selection) for row in again.rows]
        assert one.flops == sum(int(graph.ops.flops[row]) for row in rows)


class Jumping:
    """A clock of which each look takes a thousand seconds."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1000.0
        return self._now


def test_choices_do_not_depend_on_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = with_flops(unet(random.Random(2), 3))
    expected = choices(graph)

    def slow(self: Any, selections: Any, _add: Any = planner.Planner.add) -> Any:
        time.sleep(0.0005)
        return _add(self, selections)

    with monkeypatch.context() as patched:
        patched.setattr(planner.Planner, "add", slow)
        assert choices(graph) == expected
    jumping = Jumping()
    monkeypatch.setattr(time, "monotonic", jumping)
    monkeypatch.setattr(time, "process_time", jumping)
    found: list[Choice] = choices(graph)
    assert found == expected


def test_with_others_beside_it_less_is_kept() -> None:
    """Each of them keeps what this one does, which outweighs its own peak."""
    graph = with_flops(llama(1))
    held = int(graph.values.bytes.sum())
    beside = replace(graph, others=8, base_bytes=graph.base_bytes + 8 * held)
    alone, among = (choices(one)[-1].selection for one in (graph, beside))
    peaks = [evaluate(beside, selection).peak_bytes for selection in (alone, among)]
    assert peaks[1] < peaks[0] - held / 10
