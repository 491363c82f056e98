from __future__ import annotations

import pytest

from memplan.order.validate import order_fault
from tests.order.graphs import make_graph

GRAPH = make_graph([[], [0], [0], []], [(4, 1, [2], False), (8, 3, [], False)])


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ([0, 1, 2], "operator 3 does not run"),
        ([0, 1, 2, 2], "operator 2 runs twice"),
        ([0, 1, 2, 4], "there is no operator 4"),
        ([1, 0, 2, 3], "operator 1 runs before operator 0"),
        ([0, 2, 1, 3], "operator 2 runs before operator 1"),
    ],
)
def test_reasons(order: list[int], fault: str) -> None:
    assert order_fault(GRAPH, order) == fault


def test_the_peak_is_compared() -> None:
    assert order_fault(GRAPH, [0, 1, 2, 3], 8) == ""
    assert order_fault(GRAPH, [0, 1, 3, 2], 8) == "the peak is 12 bytes, not 8"
