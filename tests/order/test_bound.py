from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.order.bound import lower_bound
from memplan.order.check_bound import check_bound
from memplan.order.evaluate import peak, program_order
from memplan.order.exhaustive import exhaustive_order
from memplan.types.graph import Graph
from tests.order.graphs import graphs, random_order


def bytes_beside(graph: Graph, ran: set[int], op: int) -> int:
    """Held while `op` runs after exactly `ran`, straight from the definition."""
    total = graph.base_bytes + int(graph.scratch[op])
    for value in range(graph.values):
        maker, users = int(graph.maker[value]), set(graph.users_of(value).tolist())
        there = maker in ran or maker == op or maker == -1
        if there and (maker == op or graph.lasts[value] or users - ran):
            total += int(graph.bytes[value])
    return total


def best_by_sets(graph: Graph) -> int:
    """The largest over operators of the least over the sets that can have run before."""
    needs = [set(graph.before_of(op).tolist()) for op in range(len(graph))]
    everything = range(len(graph))
    sets = [
        set(some)
        for size in range(len(graph))
        for some in combinations(everything, size)
        if all(needs[op] <= set(some) for op in some)
    ]
    return max(
        min(bytes_beside(graph, ran, op) for ran in sets if op not in ran and needs[op] <= ran)
        for op in everything
    )


@settings(max_examples=100, deadline=None)
@given(graphs(most=8), st.integers(0, 9))
def test_the_cut_is_the_least_over_all_sets(graph: Graph, seed: int) -> None:
    bound = lower_bound(graph, random_order(graph, seed))
    assert bound.bytes == best_by_sets(graph)
    assert check_bound(graph, bound.certificate) == bound.bytes


@settings(max_examples=100, deadline=None)
@given(graphs(most=12))
def test_no_order_is_below_the_bound(graph: Graph) -> None:
    bound = lower_bound(graph, program_order(graph))
    assert check_bound(graph, bound.certificate) == bound.bytes
    assert bound.bytes <= exhaustive_order(graph)[1] <= peak(graph, program_order(graph))
