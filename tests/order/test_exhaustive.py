from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings

from memplan.order.validate import order_fault, slow_peak
from memplan.types.graph import Graph
from tests.order.exhaustive import MOST_OPERATORS, exhaustive_order
from tests.order.graphs import graphs, make_graph


@settings(max_examples=60)
@given(graphs(most=6))
def test_no_permutation_is_better(graph: Graph) -> None:
    order, peak = exhaustive_order(graph)
    assert order_fault(graph, order.tolist(), peak) == ""
    valid = (p for p in permutations(range(len(graph))) if not order_fault(graph, p))
    assert peak == min(slow_peak(graph, p) for p in valid)


def test_too_many_operators_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        exhaustive_order(make_graph([[]] * (MOST_OPERATORS + 1), []))
