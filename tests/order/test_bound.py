from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.order.bound import lower_bound
from memplan.order.evaluate import program_order
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from tests.oracles.certificate import Amounts, Certificate, Flow, Forced, certificate_of
from tests.oracles.check_bound import check_bound
from tests.order.exhaustive import exhaustive_order
from tests.order.graphs import graphs, make_graph, random_order


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
def test_the_bound_is_at_least_what_every_set_holds(graph: Graph, seed: int) -> None:
    bound = lower_bound(graph, random_order(graph, seed))
    assert bound.bytes >= best_by_sets(graph)
    assert check_bound(graph, certificate_of(graph, bound)) == bound.bytes


@settings(max_examples=150, deadline=None)
@given(graphs(most=11), st.integers(0, 9))
def test_no_order_is_below_the_bound(graph: Graph, seed: int) -> None:
    bound = lower_bound(graph, random_order(graph, seed))
    assert check_bound(graph, certificate_of(graph, bound)) == bound.bytes
    assert bound.bytes <= exhaustive_order(graph)[1]


def seeded(seed: int, count: int = 12) -> Graph:
    """Every operator makes one value; three values are there before."""
    chance = random.Random(seed)
    before = [
        {chance.randrange(op) for _ in range(chance.choice([0, 0, 1]))} if op else set[int]()
        for op in range(count)
    ]
    values = []
    for op in range(count):
        later = range(op + 1, count)
        users = {chance.choice(later) for _ in range(chance.choice([1, 1, 2, 3])) if later}
        values.append((chance.randint(1, 40), op, users, chance.random() < 0.05))
    values += [(chance.randint(1, 40), -1, {chance.randrange(count)}, False) for _ in range(3)]
    return make_graph(before, values, [chance.choice([0, 0, 5]) for _ in range(count)])


def test_the_bound_is_nearly_always_the_optimum() -> None:
    """Of graphs that nothing was fitted to; for some only by what is forced."""
    drawn = [seeded(seed) for seed in range(60)]
    bounds = [lower_bound(graph, program_order(graph)) for graph in drawn]
    exact = [exhaustive_order(graph)[1] for graph in drawn]
    hits = [bound for bound, peak in zip(bounds, exact, strict=True) if bound.bytes == peak]
    assert len(hits) >= 54
    assert any(bound.before or bound.after for bound in hits)


def test_what_lasts_and_what_is_there_count_without_an_operator() -> None:
    results = make_graph([[]] * 3, [(5, op, [], True) for op in range(3)] + [(7, -1, [], True)])
    assert lower_bound(results, [0, 1, 2]).bytes == 22 == exhaustive_order(results)[1]
    inputs = make_graph([[]] * 3, [(5, -1, [op], False) for op in range(3)], base_bytes=2)
    assert lower_bound(inputs, [0, 1, 2]).bytes == 17 == exhaustive_order(inputs)[1]
    empty = make_graph([], [(5, -1, [], True)], base_bytes=2)
    bound = lower_bound(empty, [])
    assert bound.bytes == 2 == check_bound(empty, certificate_of(empty, bound))


def two() -> Graph:
    """Each of two operators frees 10 bytes that are there, and takes 5 while it runs: whichever
    comes first holds what the other one frees. Alone, each could come second."""
    return make_graph(
        [[], [], [0, 1]],
        [(10, -1, [0], False), (10, -1, [1], False), (1, 0, [2], False), (1, 1, [2], False)],
        scratch=[5, 5, 0],
    )


def test_what_cannot_come_first_is_forced_after() -> None:
    graph = two()
    assert best_by_sets(graph) == 17
    bound = lower_bound(graph, [0, 1, 2])
    assert bound.bytes == 26 == exhaustive_order(graph)[1]
    assert len(bound.before + bound.after) == 1
    assert check_bound(graph, certificate_of(graph, bound)) == 26


def test_time_that_is_up_leaves_a_bound() -> None:
    ended = Deadline()
    ended.end()
    for deadline in (Deadline(0), ended):
        bound = lower_bound(two(), [0, 1, 2], deadline)
        assert bound.bytes == 20 == check_bound(two(), certificate_of(two(), bound))


# Certificates that are none


def certificate() -> Certificate:
    return certificate_of(two(), lower_bound(two(), [0, 1, 2]))


def amounts(*pairs: tuple[int, int]) -> Amounts:
    rows, nbytes = zip(*pairs, strict=True) if pairs else ((), ())
    return Amounts(np.array(rows, np.int64), np.array(nbytes, np.int64))


def flow(op: int, share: Amounts, rest: Amounts, back: Amounts) -> Certificate:
    return Certificate((), Flow(op, share, rest, back))


NONE = amounts()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (flow(9, NONE, NONE, NONE), "no operator 9"),
        (flow(0, amounts((0, 11)), NONE, NONE), "value 0 hands out 11 bytes, more than it has"),
        (flow(0, amounts((4, 1)), NONE, NONE), "no row 4"),
        (flow(0, amounts((0, 1), (0, 1)), NONE, NONE), "named twice"),
        (flow(0, amounts((0, -1)), NONE, NONE), "-1 bytes flow"),
        (flow(0, NONE, amounts((0, 1)), NONE), "value 0 does not last"),
        (flow(0, amounts((1, 5)), NONE, NONE), "operator 1 does not hand on what it gets: -5"),
        (
            Certificate((Forced(0, 7, flow(0, NONE, NONE, NONE).flow),), Flow(0, NONE, NONE, NONE)),
            "no operator 7",
        ),
        (
            Certificate((Forced(2, 0, flow(0, NONE, NONE, NONE).flow),), Flow(0, NONE, NONE, NONE)),
            "before and after the same",
        ),
    ],
)
def test_reasons_why_nothing_is_proved(wrong: Certificate, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_bound(two(), wrong)


def test_bytes_held_in_any_case_are_not_counted_twice() -> None:
    graph = make_graph([[]], [(5, -1, [0], True)])
    with pytest.raises(ValueError, match="counted without a flow"):
        check_bound(graph, flow(0, amounts((0, 5)), NONE, NONE))


def test_a_certificate_proves_no_more_than_its_least_flow() -> None:
    right = certificate()
    weak = replace(right.forced[0], flow=Flow(right.forced[0].flow.op, NONE, NONE, NONE))
    assert check_bound(two(), replace(right, forced=(weak,))) == 6
    # Without what was forced, the last flow would have to prove it alone.
    with pytest.raises(ValueError, match="does not hand on"):
        check_bound(two(), replace(right, forced=()))


@settings(max_examples=60, deadline=None)
@given(graphs(most=9), st.data())
def test_no_flow_whatsoever_proves_too_much(graph: Graph, data: st.DataObject) -> None:
    """Certificates changed at random prove nothing, or what is true."""
    found = certificate_of(graph, lower_bound(graph, program_order(graph)))
    columns = [found.flow.share, found.flow.rest, found.flow.back]
    chosen = data.draw(st.integers(0, 2))
    limit = (len(graph.users), graph.values, len(graph.before))[chosen]
    change = data.draw(st.dictionaries(st.integers(0, max(limit, 1)), st.integers(-2, 30)))
    column = dict(zip(columns[chosen].rows.tolist(), columns[chosen].bytes.tolist(), strict=True))
    for row, nbytes in change.items():
        column[row] = column.get(row, 0) + nbytes
    columns[chosen] = amounts(*column.items())
    op = data.draw(st.sampled_from([found.flow.op, -1, len(graph), 0]))
    try:
        proved = check_bound(graph, replace(found, flow=Flow(op, *columns)))
    except ValueError:
        return
    assert proved <= exhaustive_order(graph)[1]
