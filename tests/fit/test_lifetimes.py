"""Forward lifetimes learnt from a capture in which values were dropped."""

from __future__ import annotations

import pytest

from memplan.fit.lifetimes import with_observed_lifetimes
from memplan.recompute.evaluate import evaluate
from memplan.recompute.selection import Selection
from memplan.types.step_graph import StepGraph
from tests.recompute.graphs import GraphDraft

A = 0
FORWARD = 5
DROPPED = Selection((frozenset({A}),))


def graph(*, a_free: int, aliases: int = 0, last: str = "loss") -> StepGraph:
    """a 100 → b 10 → view of b → c 50 → loss; backward reads b, then a. `aliases`: views that the
    runtime makes of b, one after the other, before anything else happens to it."""
    draft = GraphDraft(forward_ops=FORWARD + aliases)
    draft.op("make", "m", 1.0, [])
    a = draft.value(100, 0)
    draft.op("relu", "m", 1.0, [a])
    b = draft.value(10, 1)
    for _ in range(aliases):
        draft.op("aten.detach.default", "m", 0.0, [b])
    draft.op("view", "m", 0.0, [b])
    draft.op("mm", "m", 1.0, [b])
    c = draft.value(50, 3 + aliases)
    draft.op(last, "m", 1.0, [c])
    draft.op("mm_backward", "", 1.0, [b, c])
    draft.op("relu_backward", "", 1.0, [a])
    end = len(draft.name)
    draft.writes[0], draft.writes[1], draft.writes[3 + aliases] = [a], [b], [c]
    draft.free[:] = [a_free, end, end - 1]
    draft.droppable[:] = [True, True, False]
    return draft.graph()


PLAIN = graph(a_free=7)


@pytest.mark.parametrize("aliases", [0, 2])
@pytest.mark.parametrize(
    ("gone", "read_by", "peak", "peak_row"),
    [
        (2, None, 110, 1),  # as the ops tell: with a and b at op 1
        (3, 2, 110, 1),
        (4, 4, 160, 3),  # a is still there when op 3 makes c
        (5, 4, 160, 3),
    ],
)
def test_a_value_that_somebody_holds_lives_as_long_as_seen(
    aliases: int, gone: int, read_by: int | None, peak: int, peak_row: int
) -> None:
    """The runtime's own aliases, which shift the rows of the capture, do not count."""
    seen = graph(a_free=gone + (aliases if gone > 2 else 0), aliases=aliases)
    learnt = with_observed_lifetimes(PLAIN, seen, frozenset({A}))
    readers = [row for row in range(FORWARD) if A in learnt.ops.reads_of(row)]
    assert readers == [1, *([read_by] if read_by else [])]
    assert all(set(PLAIN.ops.reads_of(row)) <= set(learnt.ops.reads_of(row)) for row in range(7))
    found = evaluate(learnt, DROPPED)
    assert (found.peak_bytes, found.peak_row) == (peak, peak_row)
    assert found.added_seconds == evaluate(PLAIN, DROPPED).added_seconds
    assert with_observed_lifetimes(learnt, seen, frozenset({A})) is learnt, "nothing new"


def test_what_is_held_into_backward_cannot_be_dropped() -> None:
    learnt = with_observed_lifetimes(PLAIN, graph(a_free=6), frozenset({A}))
    assert learnt.values.droppable.tolist() == [False, True, False]


def test_only_what_was_dropped_is_learnt_from() -> None:
    assert with_observed_lifetimes(PLAIN, graph(a_free=6), frozenset()) is PLAIN


def test_another_forward_teaches_nothing() -> None:
    other = graph(a_free=6, last="another_loss")
    assert with_observed_lifetimes(PLAIN, other, frozenset({A})) is PLAIN
