from __future__ import annotations

import logging
import sys

import pytest
from hypothesis import given, settings

from memplan.order.baselines import NAMES, baseline_orders, best, inductor_orders
from memplan.order.validate import order_fault
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from tests.order.exhaustive import exhaustive_order
from tests.order.graphs import graphs, make_graph


@settings(max_examples=60, deadline=None)
@given(graphs(most=9))
def test_every_candidate_is_an_order(graph: Graph) -> None:
    candidates = baseline_orders(graph)
    assert candidates[0].name == "program"
    assert candidates[0].order.tolist() == list(range(len(graph)))
    assert {c.name for c in candidates[1:]} == (set(NAMES) if len(graph) > 1 else set())
    for candidate in candidates:
        assert order_fault(graph, candidate.order.tolist(), candidate.peak_bytes) == ""
    assert best(candidates).peak_bytes >= exhaustive_order(graph)[1]


def fan() -> Graph:
    """Three large values that program order makes first; each shrinks at once if it may."""
    return make_graph(
        [[]] * 6,
        [(10, 0, [3], False), (10, 1, [4], False), (10, 2, [5], False)]
        + [(1, op, [], True) for op in (3, 4, 5)],
    )


def test_least_peak_memory_first_frees_at_once() -> None:
    candidates = {c.name: c for c in baseline_orders(fan())}
    assert candidates["program"].peak_bytes == 31
    assert candidates["lpmf"].peak_bytes == 13
    assert candidates["lpmf"].order.tolist() == [0, 3, 1, 4, 2, 5]
    assert best(list(candidates.values())).peak_bytes == 13


def test_a_chain_deeper_than_pythons_stack() -> None:
    count = 2 * sys.getrecursionlimit() + 5000
    graph = make_graph(
        [[op - 1] if op else [] for op in range(count)],
        [(count - op, op, [op + 1], False) for op in range(count - 1)],
    )
    limit = sys.getrecursionlimit()
    found = inductor_orders(graph, Deadline())
    assert all(order.tolist() == list(range(count)) for order in found.values())
    assert len(found) == 3
    assert sys.getrecursionlimit() == limit


class EndsAt(Deadline):
    """Passes when it was looked at so many times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def left(self) -> float:
        self._looks -= 1
        return float(max(self._looks, 0))


def test_what_is_found_before_the_end_of_time_counts() -> None:
    assert set(inductor_orders(fan(), EndsAt(10))) == {"lpmf"}
    assert [c.name for c in baseline_orders(fan(), Deadline(0))] == ["program"]


def test_another_inductor_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import memory

    monkeypatch.delattr(memory, "topological_sort_lpmf")
    with caplog.at_level(logging.WARNING):
        assert [c.name for c in baseline_orders(fan())] == ["program"]
    assert "Inductor" in caplog.text
