"""Requested bytes of an order beside what the allocator hands out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.order.allocated import allocated_peak
from memplan.order.evaluate import peak
from memplan.types.graph import Graph
from tests.order.graphs import graphs, make_graph, random_order

MIB = 1 << 20


@settings(max_examples=25, deadline=None)
@given(graphs(), st.integers(0, 2**20))
def test_blocks_hold_what_is_asked_for(graph: Graph, seed: int) -> None:
    large = replace(
        graph,
        bytes=graph.bytes * 700_001,
        scratch=graph.scratch * 700_001,
        base_bytes=graph.base_bytes * 700_001,
    )
    order, held = random_order(graph, seed), [large.base_bytes]
    asked = peak(large, order)
    blocks = large.values + 2
    split = allocated_peak(large, order, held, "expandable_segments:True")
    assert 0 <= split - asked <= 512 * blocks
    assert 0 <= allocated_peak(large, order, held) - asked <= (MIB + 512) * blocks


def test_a_block_that_is_not_split_counts_whole() -> None:
    """The second value comes to lie in the block of the first."""
    before = [set(), {0}, {1}]
    values = [(12 * MIB, 0, [], False), (12 * MIB - 300_000, 1, [2], False)]
    graph = make_graph(before, values, scratch=[0, 0, 64 * MIB], base_bytes=30 * MIB)
    order = np.arange(3)
    assert peak(graph, order) == (30 + 12 + 64) * MIB - 300_000
    assert allocated_peak(graph, order, [30 * MIB]) >= (30 + 12 + 64) * MIB
