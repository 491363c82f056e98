from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.order.evaluate import held, lifetimes, peak, positions, program_order
from memplan.order.validate import order_fault, slow_peak
from memplan.types.graph import Graph
from tests.order.graphs import graphs, make_graph, random_order


def small() -> Graph:
    """op0 makes a (10) and b (3, unused); op1 makes c (5) of a; op2 uses x (7, there before)."""
    return make_graph(
        [[], [], [], [1, 2]],
        [
            (10, 0, [1], False),
            (3, 0, [], False),
            (5, 1, [3], False),
            (7, -1, [2], False),
            (100, -1, [], False),
            (1, -1, [], True),
            (2, 3, [], True),
        ],
        scratch=[0, 0, 4, 0],
        base_bytes=1000,
    )


def test_bytes_held_by_hand() -> None:
    graph = small()
    assert held(graph, [0, 1, 2, 3]).tolist() == [1021, 1023, 1017, 1008]
    assert held(graph, [2, 0, 1, 3]).tolist() == [1012, 1014, 1016, 1008]
    assert peak(graph, [0, 1, 2, 3]) == 1023
    start, stop = lifetimes(graph, [2, 0, 1, 3])
    assert list(zip(start.tolist(), stop.tolist(), strict=True)) == [
        (1, 3), (1, 2), (2, 4), (0, 1), (0, 0), (0, 4), (3, 4)
    ]  # fmt: skip


@given(graphs(), st.integers(0, 99))
def test_the_sweep_says_what_the_state_machine_says(graph: Graph, seed: int) -> None:
    order = random_order(graph, seed)
    assert order_fault(graph, order, peak(graph, order)) == ""
    assert slow_peak(graph, order) == peak(graph, order)


def test_a_graph_without_operators_holds_its_base() -> None:
    graph = make_graph([], [(5, -1, [], True)], base_bytes=9)
    assert peak(graph, program_order(graph)) == 9 == slow_peak(graph, [])


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [0, 1, 2, -1]])
def test_what_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="every operator once"):
        positions(np.array(order), 4)
