"""Steps cut at articulation points, and what the chain predicts of them."""

from __future__ import annotations

import random
from itertools import combinations

import networkx as nx  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.recompute.articulation import Articulation, articulations, forward_uses
from memplan.recompute.chain import least_peak
from memplan.recompute.cut import Cut, _chain, _cut, least_peak_chain, selection_for
from memplan.recompute.evaluate import evaluate
from memplan.recompute.selection import Selection
from memplan.types.step_graph import StepGraph
from tests.oracles.chain_walk import walk_peak
from tests.oracles.played_selection import evaluate_slowly
from tests.recompute import graphs

seeds = st.integers(0, 2**32 - 1)


def chain_of(graph: StepGraph, longest: int | None = None) -> Cut:
    longest = graph.forward_ops if longest is None else longest
    return _chain(graph, _cut(graph, forward_uses(graph), longest))


def random_step(seed: int) -> StepGraph:
    """A forward whose ops read mostly recent values, some of them written in place."""
    rng = random.Random(seed)
    step = graphs.TrainingStep()
    known = [step.input()]
    for i in range(rng.randint(1, 14)):
        reads = [known[-1]] if rng.random() < 0.7 else rng.sample(known, min(len(known), 2))
        if rng.random() < 0.1:
            reads = [step.input()]
        saves = ([0], []) if rng.random() < 0.6 else ([], [0])
        known += step.op(
            "op", f"m.{i}", reads, [rng.randint(1, 9)] * rng.choice([1, 1, 2]), 1, saves
        )
        if rng.random() < 0.2:
            row = step.draft.op("write_", f"m.{i}", 1, [known[-1]])
            step.draft.writes[row] = [known[-1]]
    step.op("loss", "loss", [known[-1]], [1], 1, ([0], []))
    return step.graph()


def cut_points(graph: StepGraph) -> list[Articulation]:
    return articulations(graph, forward_uses(graph), graph.forward_ops)


def through_all(graph: StepGraph) -> dict[int, int]:
    """Final values whose removal leaves no path from the ops before some row to those from it on,
    with the first such row, by reachability in networkx. Nodes are ops and writes of values."""
    edges = nx.DiGraph()
    edges.add_node("end")
    node: dict[int, tuple[int, int]] = {}
    for row in range(len(graph)):
        op = ("op", row) if row < graph.forward_ops else "end"
        reads = graph.ops.reads_of(row)
        writes = [v for v in graph.ops.writes_of(row) if op != "end"]
        edges.add_edges_from((node[value], op) for value in {*reads, *writes} if value in node)
        for value in writes:
            node[value] = (value, row)
            edges.add_edge(op, node[value])
    leading = nx.ancestors(edges, "end")
    rows = [row for row in range(graph.forward_ops) if ("op", row) in leading]
    found: dict[int, int] = {}
    for value, (_, last) in node.items():
        rest = edges.subgraph(set(edges) - {node[value], "end"})
        reached = {row: nx.descendants(rest, ("op", row)) for row in rows}
        uses = [row for row in rows if edges.has_edge(node[value], ("op", row))]
        for row in range(last + 1, max(uses, default=-1) + 1):
            after = {("op", r) for r in rows if r >= row}
            if not any(reached[r] & after for r in rows if r < row):
                found[value] = row
                break
    return found


@settings(max_examples=120, deadline=None)
@given(seeds)
def test_articulation_points_are_those_of_networkx(seed: int) -> None:
    graph = random_step(seed)
    assert {point.value: point.row for point in cut_points(graph)} == through_all(graph)


def shapes(seed: int) -> StepGraph:
    rng = random.Random(seed)
    make = rng.choice([graphs.chain, graphs.residual_blocks, graphs.unet])
    return make(rng, rng.randint(1, 7))


def predicted_peak(graph: StepGraph, chain_bytes: int) -> int:
    """The step's peak, given that of its chain."""
    return max(graph.rest_peak_bytes, graph.base_bytes + chain_bytes)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_the_chain_predicts_the_plain_run(seed: int) -> None:
    for graph in (shapes(seed), random_step(seed)):
        cut = chain_of(graph)
        plain = evaluate(graph, Selection()).peak_bytes
        assert predicted_peak(graph, walk_peak(cut.chain, ())) == plain


def holds_for_nothing(graph: StepGraph, cut: Cut, checkpoints: tuple[int, ...]) -> bool:
    """Whether an unsaved checkpoint comes before a segment in which nothing is dropped; the chain
    counts it as held, the selection leaves it."""
    selection = selection_for(graph, cut, checkpoints)
    unsaved = [k for k in checkpoints[:-1] if not cut.chain.output_saved[k]]
    return len(selection.held) < len(unsaved)


@settings(max_examples=60, deadline=None)
@given(seeds, st.data())
def test_on_chains_the_prediction_is_what_the_evaluator_says(
    seed: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    graph = rng.choice([graphs.chain, graphs.residual_blocks])(rng, rng.randint(2, 7))
    cut = chain_of(graph)
    inner = list(range(1, len(cut.chain)))
    chosen = data.draw(st.sets(st.sampled_from(inner)) if inner else st.just(set()))
    checkpoints = tuple(sorted(chosen))
    predicted = predicted_peak(graph, walk_peak(cut.chain, checkpoints))
    evaluated = evaluate(graph, selection_for(graph, cut, checkpoints)).peak_bytes
    assert evaluated <= predicted
    if not holds_for_nothing(graph, cut, checkpoints):
        assert evaluated == predicted
    assert evaluate_slowly(graph, selection_for(graph, cut, checkpoints)).peak_bytes == evaluated


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_the_least_peak_is_the_least_of_all_checkpoints(seed: int) -> None:
    rng = random.Random(seed)
    graph = graphs.chain(rng, rng.randint(1, 7))
    cut = chain_of(graph)
    inner = range(1, len(cut.chain))
    least = min(
        evaluate(graph, selection_for(graph, cut, subset)).peak_bytes
        for size in range(len(inner) + 1)
        for subset in combinations(inner, size)
    )
    assert evaluate(graph, least_peak_chain(graph)).peak_bytes == least


def test_a_unet_has_no_articulation_point_under_a_skip() -> None:
    graph = graphs.unet(random.Random(0), 3)
    modules = [graph.ops.module[int(graph.values.alloc[p.value])] for p in cut_points(graph)]
    assert modules
    assert not {m for m in modules if m.startswith(("down.1", "down.2", "up.0", "up.1"))}


def test_blocks_are_cut_between_and_held_where_backward_reads_nothing() -> None:
    graph = graphs.residual_blocks(random.Random(1), 12)
    cut = chain_of(graph)
    assert len(cut.chain) >= 12
    found = least_peak(cut.chain)
    evaluated = evaluate(graph, least_peak_chain(graph)).peak_bytes
    assert evaluated == predicted_peak(graph, found.peak_bytes)
    assert evaluated < 0.6 * evaluate(graph, Selection()).peak_bytes


@pytest.mark.parametrize("forward", [0, 1])
def test_steps_with_next_to_nothing(forward: int) -> None:
    draft = graphs.GraphDraft(forward_ops=forward)
    for _ in range(forward):
        draft.op("op", "m", 1.0, [])
    graph = draft.graph(base_bytes=7)
    cut = chain_of(graph)
    assert len(cut.chain) == forward
    assert least_peak_chain(graph) == Selection()
    assert predicted_peak(graph, least_peak(cut.chain).peak_bytes) == 7
    assert np.array_equal(cut.chain.output, np.zeros(forward + 1))


def shared_by_all(layers: int) -> StepGraph:
    """A value made at the start that each layer reads and whose own backward reads nothing."""
    step = graphs.TrainingStep()
    [x] = step.op("embed", "embed", [step.input()], [16], 1)
    [memory] = step.op("encode", "encode", [x], [4], 1)
    for i in range(layers):
        [a] = step.op("cross", f"l.{i}", [x, memory], [16], 1, ([0], []))
        [x] = step.op("linear", f"l.{i}", [a], [16], 4, ([0], []))
    step.op("loss", "loss", [x], [1], 1, ([0], []))
    return step.graph()


def test_values_in_use_throughout_are_set_aside_and_held() -> None:
    graph = shared_by_all(12)
    assert len(chain_of(graph).chain) < 6
    cut = chain_of(graph, longest=8)
    assert len(cut.chain) > 24
    [memory] = cut.aside
    assert graph.ops.module[int(graph.values.alloc[memory])] == "encode"
    found = least_peak(cut.chain)
    selection = selection_for(graph, cut, found.checkpoints)
    assert memory in selection.held
    evaluated = evaluate(graph, selection)
    assert evaluated.peak_bytes == predicted_peak(graph, found.peak_bytes)
    assert evaluate(graph, least_peak_chain(graph)).peak_bytes <= evaluated.peak_bytes
    assert evaluated.peak_bytes < evaluate(graph, Selection()).peak_bytes


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_prediction_is_never_below_the_evaluation(seed: int) -> None:
    graph = shapes(seed)
    for longest in (3, 8, graph.forward_ops):
        cut = chain_of(graph, longest)
        found = least_peak(cut.chain)
        evaluated = evaluate(graph, selection_for(graph, cut, found.checkpoints))
        assert evaluated.peak_bytes <= predicted_peak(graph, found.peak_bytes)
