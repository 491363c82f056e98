"""The quick evaluator says what the slow state machine says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.recompute.evaluate import Evaluator, evaluate, from_arrays, to_arrays
from memplan.recompute.selection import Selection, to_part
from memplan.types.step_graph import StepGraph
from tests.oracles.played_selection import evaluate_slowly
from tests.recompute.graphs import (
    GraphDraft,
    TrainingStep,
    arbitrary_graph,
    arbitrary_selection,
    chain,
    llama,
    residual_blocks,
    unet,
)


def assert_agree(graph: StepGraph, selection: Selection) -> None:
    quick, slow = evaluate(graph, selection), evaluate_slowly(graph, selection)
    assert quick.peak_bytes == slow.peak_bytes
    assert quick.peak_row == slow.peak_row
    assert quick.replayed_ops == slow.replayed_ops
    assert quick.added_seconds == pytest.approx(slow.added_seconds)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    forward=st.integers(1, 9),
    backward=st.integers(0, 9),
    others=st.sampled_from([0, 3]),
)
def test_equal_to_the_state_machine_on_arbitrary_graphs(
    seed: int, forward: int, backward: int, others: int
) -> None:
    rng = random.Random(seed)
    graph = arbitrary_graph(rng, forward, backward, others)
    for _ in range(3):
        assert_agree(graph, arbitrary_selection(rng, graph))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), shape=st.sampled_from([chain, residual_blocks, unet]))
def test_equal_to_the_state_machine_on_training_steps(seed: int, shape: object) -> None:
    rng = random.Random(seed)
    graph = shape(rng, 3)  # type: ignore[operator]
    for _ in range(3):
        assert_agree(graph, arbitrary_selection(rng, graph))


def test_nothing_dropped_is_the_plain_run() -> None:
    graph = llama(2)
    alive = np.zeros(len(graph) + 1, dtype=np.int64)
    np.add.at(alive, np.maximum(graph.values.alloc, 0), graph.values.bytes)
    np.add.at(alive, graph.values.free, -graph.values.bytes)
    result = evaluate(graph, Selection())
    assert result.peak_bytes == max(
        graph.rest_peak_bytes, graph.base_bytes + int(np.cumsum(alive).max())
    )
    assert (result.added_seconds, result.replayed_ops) == (0.0, 0)


def three_layers() -> tuple[StepGraph, list[int]]:
    step = TrainingStep()
    values = [step.input()]
    for i, size in enumerate((10, 20, 40)):
        values += step.op("layer", f"m.{i}", [values[-1]], [size], i + 1, ([], [0]))
    return step.graph(), values


def test_one_group_is_replayed_once_and_two_pay_for_what_they_share() -> None:
    graph, (_, a, b, _) = three_layers()
    together = evaluate(graph, Selection((frozenset({a, b}),)))
    apart = evaluate(graph, Selection((frozenset({a}), frozenset({b}))))
    assert (together.added_seconds, together.replayed_ops) == (3.0, 2)
    assert (apart.added_seconds, apart.replayed_ops) == (4.0, 3)


def test_a_held_value_is_where_a_replay_begins() -> None:
    step = TrainingStep()
    [x] = step.op("a", "m", [step.input()], [8], 5.0)
    [y] = step.op("b", "m", [x], [8], 1.0, ([], [0]))
    step.op("loss", "m", [y], [1], 1.0)
    graph = step.graph()
    drop = (frozenset({y}),)
    assert evaluate(graph, Selection(drop)).added_seconds == 6.0
    assert evaluate(graph, Selection(drop, frozenset({x}))).added_seconds == 1.0


def test_a_source_lives_until_the_replay_that_needs_it() -> None:
    draft = GraphDraft(forward_ops=2)
    for row, name in enumerate(["make", "use", "first", "big", "last"]):
        draft.op(name, "m", 1.0, [])
        draft.writes[row] = [draft.value([100, 10, 1, 50, 1][row], row)]
    draft.reads = [[], [0], [0], [], [1]]
    draft.free = [3, 5, 3, 4, 5]
    draft.droppable[1] = True
    graph = draft.graph()
    assert evaluate(graph, Selection()).peak_bytes == 111
    dropped = evaluate(graph, Selection((frozenset({1}),)))
    assert (dropped.peak_bytes, dropped.peak_row) == (150, 3)


def test_impossible_selections_are_refused() -> None:
    graph, (x, a, b, _) = three_layers()
    for selection, says in (
        (Selection((frozenset({x}),)), f"value {x} cannot be dropped"),
        (Selection((frozenset({a}), frozenset({a, b}))), f"value {a} is dropped in two groups"),
        (Selection((frozenset({99}),)), "value 99 cannot be dropped"),
        (Selection((), frozenset({x})), f"value {x} cannot be held"),
        (Selection((frozenset({a}),), frozenset({a})), f"value {a} cannot be held"),
    ):
        for judge in (evaluate, evaluate_slowly):
            with pytest.raises(ValueError, match=says):
                judge(graph, selection)


def test_the_native_model_refuses_what_cannot_be() -> None:
    graph, (x, *_) = three_layers()
    group, held = to_arrays(graph, Selection())
    group[x] = 0
    with pytest.raises(ValueError, match="cannot be dropped"):
        Evaluator(graph).profile(group, held)
    with pytest.raises(ValueError, match="differ in length"):
        Evaluator(graph).profile(group[1:], held)


@given(seed=st.integers(0, 2**32))
def test_arrays_and_selections_say_the_same(seed: int) -> None:
    rng = random.Random(seed)
    graph = arbitrary_graph(rng, 6, 6)
    selection = arbitrary_selection(rng, graph)
    again = from_arrays(*to_arrays(graph, selection))
    assert again.groups == tuple(filter(None, selection.groups))
    assert again.held == selection.held


def test_a_plan_names_values_by_op_and_place() -> None:
    graph, (_, a, b, c) = three_layers()
    part = to_part(
        graph,
        Selection((frozenset({a}), frozenset({b, c}))),
        budget_bytes=7,
        peak_bytes=6,
        added_seconds=0.5,
    )
    assert [(group.name, [(o.op, o.nth, o.output, o.call) for o in group.drop])
            for group in part.groups] == [
        ("m.0", [("layer", 0, 0, 0)]),
        ("m", [("layer", 1, 0, 0), ("layer", 2, 0, 0)]),
    ]  # fmt: skip
    assert (part.budget_bytes, part.peak_bytes, part.added_seconds) == (7, 6, 0.5)
