"""Parts of an order as graphs of their own, and the leaves that are solved exactly."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.order.compose import composed, part_of
from memplan.order.evaluate import held, peak, program_order
from memplan.order.leaf import exact_order
from memplan.order.refine import leaves
from memplan.order.validate import order_fault
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from tests.order.exhaustive import exhaustive_order
from tests.order.graphs import graphs, make_graph, random_order


@settings(max_examples=100, deadline=None)
@given(graphs(12), st.integers(0, 11), st.integers(1, 12), st.integers(0, 99))
def test_a_part_of_single_operators_holds_what_the_step_holds(
    graph: Graph, start: int, length: int, seed: int
) -> None:
    order = np.array(random_order(graph, seed), np.int64)
    start = min(start, len(graph) - 1)
    pieces = [[op] for op in order[start : start + length].tolist()]
    part = part_of(graph, order, start, pieces)
    part.check()
    part_order = random_order(part, seed + 1)
    whole = composed(order, start, pieces, part_order)
    assert order_fault(graph, whole.tolist()) == ""
    here = held(graph, whole)[start : start + len(pieces)]
    assert held(part, part_order).tolist() == here.tolist()


@settings(max_examples=100, deadline=None)
@given(graphs(14), st.integers(0, 13), st.integers(4, 8), st.integers(0, 99))
def test_leaves_cover_an_order_and_hold_no_less(
    graph: Graph, place: int, nodes: int, seed: int
) -> None:
    order = np.array(random_order(graph, seed), np.int64)
    levels = leaves(len(graph), min(place, len(graph) - 1), nodes)
    assert sorted(p for leaf in levels for p in leaf.places()) == list(range(len(graph)))
    for leaf in levels:
        pieces = leaf.pieces(order)
        assert len(pieces) <= nodes
        part = part_of(graph, order, leaf.start, pieces)
        part.check()
        most = held(graph, order)[leaf.start : leaf.stop].max()
        assert peak(part, program_order(part)) >= most


@settings(max_examples=25, deadline=None)
@given(graphs(9))
def test_a_leaf_is_solved_exactly(graph: Graph) -> None:
    hint = np.array(random_order(graph, 1), np.int64)
    order = exact_order(graph, hint, seed=0, work=20.0, deadline=Deadline(600.0)).order
    assert order_fault(graph, order.tolist()) == ""
    assert peak(graph, order) == exhaustive_order(graph)[1]


def test_a_leaf_ends_by_its_work() -> None:
    """It says how much it took, the same each time."""
    chance = random.Random(5)
    before = [set(chance.sample(range(max(0, op - 9), op), min(op, 2))) for op in range(60)]
    users = [{op for op in range(60) if maker in before[op]} for maker in range(60)]
    values = [(chance.randint(1, 99), maker, users[maker], False) for maker in range(60)]
    graph = make_graph(before, values)
    first, second = (
        exact_order(graph, program_order(graph), seed=0, work=0.1, deadline=Deadline(600.0))
        for _ in range(2)
    )
    assert first.order.tolist() == second.order.tolist()
    assert 0.05 < first.work == second.work < 0.5


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_pythons_after_a_leaf_is_solved() -> None:
    """CP-SAT takes SIGINT for itself unless told not to, and leaves it so that it ends Python."""
    graph = make_graph([set()] * 4, [(3, 0, {3}, False), (5, 1, {2}, False), (4, 2, {3}, False)])
    assert caught(signal.SIGINT)
    start = program_order(graph)
    order = exact_order(graph, start, seed=0, work=20.0, deadline=Deadline(600.0)).order
    assert peak(graph, order) < peak(graph, program_order(graph))  # CP-SAT has run
    assert caught(signal.SIGINT)


def caught(number: int) -> bool:
    """Whether the process handles the signal, as the system sees it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)
