"""The solver against exhaustive search, the baselines, and a checker that knows nothing of it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from memplan.order import refine
from memplan.order import solve as solve_module
from memplan.order.baselines import Candidate, baseline_orders, best
from memplan.order.bound import Bound
from memplan.order.evaluate import peak, program_order
from memplan.order.leaf import Exact
from memplan.order.refine import Improved, improve
from memplan.order.solve import solve
from memplan.order.updates import MOST_AFTER, early_updates
from memplan.order.validate import order_fault
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.solution import Solved, TimedOut
from memplan.types.trace import I64
from tests.oracles.certificate import certificate_of
from tests.oracles.check_bound import check_bound
from tests.order.exhaustive import exhaustive_order
from tests.order.graphs import graphs, make_graph, random_order


def training_step(layers: int, batch: int = 4, weight: int = 3, last: int = 8) -> Graph:
    """Forward, backward and Adam of a chain: updates come last, each with two temporaries, and may
    run after their gradient. The last layer's weight is `last` times the others'."""
    before: list[set[int]] = []
    values: list[tuple[int, int, set[int], bool]] = []

    def op(*needs: int) -> int:
        before.append(set(needs))
        return len(before) - 1

    forward = [op() for _ in range(layers)]
    for earlier, later in pairwise(forward):
        before[later].add(earlier)
    loss = op(forward[-1])
    gradients, flow = [], loss
    for layer in reversed(range(layers)):
        flow = op(flow, forward[layer])
        gradients.append((flow, layer))
    for layer in range(layers):
        users = {loss if layer == layers - 1 else forward[layer + 1]}
        users.add(next(row for row, of in gradients if of == layer))
        values.append((batch, forward[layer], users, False))
    for place, (row, layer) in enumerate(gradients):
        size = weight * (last if layer == layers - 1 else 1)
        first, second = op(row), op()
        before[second].add(first)
        values.append((size, row, {first, second}, False))
        values.append((size, first, {second}, False))
        if place + 1 < len(gradients):
            values.append((batch, row, {gradients[place + 1][0]}, False))
    values.append((1, loss, set(), True))
    return make_graph(before, values)


def answer_of(graph: Graph, seconds: float = 30.0, seed: int = 0) -> Solved[solve_module.Order]:
    answer = solve(graph, deadline=Deadline(seconds), seed=seed)
    assert isinstance(answer, Solved)
    order = answer.solution
    assert order_fault(graph, order.order.tolist(), order.peak_bytes) == ""
    assert answer.cost == order.peak_bytes
    assert check_bound(graph, certificate_of(graph, order.proof)) == answer.bound <= answer.cost
    return answer


@settings(max_examples=60, deadline=None)
@given(graphs(14))
def test_small_graphs_get_the_order_that_exhaustive_search_finds(graph: Graph) -> None:
    answer = answer_of(graph)
    assert answer.cost == exhaustive_order(graph)[1]


@settings(max_examples=40, deadline=None)
@given(graphs(30))
def test_the_native_search_gives_valid_orders_and_true_bounds(graph: Graph) -> None:
    start = np.array(random_order(graph, 1), np.int64)
    found = improve(graph, start, graph.base_bytes, Deadline(600.0))
    assert order_fault(graph, found.order.tolist(), found.peak_bytes) == ""
    assert found.bound_bytes <= found.peak_bytes <= peak(graph, start)
    if len(graph) <= 12:
        assert found.bound_bytes <= exhaustive_order(graph)[1]


@pytest.mark.parametrize("batch", [1, 4, 40])
def test_updates_move_to_their_gradients(batch: int) -> None:
    graph = training_step(12, batch)
    answer = answer_of(graph)
    assert answer.cost == answer.bound  # proved
    assert answer.cost <= best(baseline_orders(graph)).peak_bytes
    if batch == 1:
        assert answer.cost < 0.7 * peak(graph, program_order(graph))


def test_early_updates_need_no_search_on_a_training_step() -> None:
    graph = training_step(60, batch=1, last=1)
    order = early_updates(graph, program_order(graph))
    assert order_fault(graph, order.tolist()) == ""
    answer = answer_of(graph)
    assert peak(graph, order) == answer.cost == answer.bound < peak(graph, program_order(graph))


@settings(max_examples=60, deadline=None)
@given(graphs(14))
def test_early_updates_of_any_graph_are_an_order(graph: Graph) -> None:
    order = early_updates(graph, np.array(random_order(graph, 2), np.int64))
    assert order_fault(graph, order.tolist()) == ""


def test_counters_that_last_wait_for_the_end() -> None:
    """As of batch norms: a new tensor each, which nothing in the step needs."""
    layers = MOST_AFTER + 1
    forward = [2 * layer for layer in range(layers)]  # each with a counter behind it
    backward = range(2 * layers, 3 * layers)
    counters: list[tuple[int, int, list[int], bool]] = [(8, op + 1, [], True) for op in forward]
    saved = [
        (100, op, [op + 2, end], False) for op, end in zip(forward, reversed(backward), strict=True)
    ]
    chain = [(0, op, [op + 1], False) for op in backward[:-1]]
    graph = make_graph([[] for _ in range(3 * layers)], [*counters, *saved, *chain])
    order = early_updates(graph, program_order(graph))
    assert peak(graph, program_order(graph)) == 108 * layers
    assert peak(graph, order) == 100 * layers


def test_leaves_lower_what_the_search_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native search, leaves around the peak do the work."""
    monkeypatch.setattr(
        refine, "improve",
        lambda graph, order, floor, deadline: Improved(order, peak(graph, order), floor),
    )  # fmt: skip
    graph = training_step(4, batch=1)
    found = refine.refine(graph, program_order(graph), 0, Deadline(600.0), seed=0)
    assert found.peak_bytes == answer_of(graph).cost < peak(graph, program_order(graph))


def test_leaves_are_left_alone_where_they_would_gain_a_thousandth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take seconds."""
    graph = training_step(4, batch=1)
    most = 1_000_000
    asked: list[int] = []

    def as_it_is(graph: Graph, order: Any, floor: int, deadline: Deadline) -> Improved:
        return Improved(order, most, floor)

    def leaves(_graph: Graph, found: Improved, *_rest: Any) -> Any:
        asked.append(found.bound_bytes)
        return Exact(found.order, 0.0)

    monkeypatch.setattr(refine, "improve", as_it_is)
    monkeypatch.setattr(refine, "_with_leaves", leaves)
    for floor in (999_500, 998_000):
        refine.refine(graph, program_order(graph), floor, Deadline(600.0), seed=0)
    assert asked[:1] == [998_000] and 999_500 not in asked


def test_leaves_end_by_work_and_not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: the clock ends them only with the whole search."""
    graph, whole = random_graph(150), Deadline(600.0)
    given: list[float] = []

    def improve(graph: Graph, order: I64, floor: int, _deadline: Deadline) -> Improved:
        return Improved(order, peak(graph, order), floor)

    def exact(part: Graph, hint: I64, *, seed: int, work: float, deadline: Deadline) -> Any:
        assert deadline is whole
        given.append(work)
        backwards = early_updates(part, hint)  # better or not, all the work is taken
        return Exact(backwards, work)

    monkeypatch.setattr(refine, "improve", improve)
    monkeypatch.setattr(refine, "exact_order", exact)
    monkeypatch.setattr(refine, "ALL_WORK", 5.0)
    refine.refine(graph, np.array(random_order(graph, 1), np.int64), 0, whole, seed=0)
    assert 0 < sum(given) <= 5.0


def test_the_same_seed_gives_the_same_order() -> None:
    graph = random_graph(40)
    first, second = answer_of(graph, seed=3), answer_of(graph, seed=3)
    assert first.solution.order.tolist() == second.solution.order.tolist()


def random_graph(count: int) -> Graph:
    chance = random.Random(5)
    before: list[set[int]] = []
    values = []
    for op in range(count):
        before.append({chance.randrange(op)} if op and chance.random() < 0.5 else set())
        users = chance.sample(range(op + 1, count), min(2, count - op - 1))
        values.append((chance.randint(1, 50), op, set(users), False))
    return make_graph(before, values)


def test_cancelled_at_once_there_is_still_an_order_and_a_bound() -> None:
    graph, ended = training_step(30), Deadline(60.0)
    ended.end()
    answer = solve(graph, deadline=ended)
    order = answer.solution if isinstance(answer, Solved) else answer.best
    assert order is not None
    assert order_fault(graph, order.order.tolist(), order.peak_bytes) == ""
    assert order.peak_bytes <= peak(graph, program_order(graph))
    assert check_bound(graph, certificate_of(graph, order.proof)) == answer.bound


def test_out_of_time_is_said() -> None:
    graph = random_graph(150)
    answer = solve(graph, deadline=Deadline(0.2))
    assert isinstance(answer, TimedOut) and answer.best is not None
    assert answer.bound < answer.cost == answer.best.peak_bytes


@pytest.mark.parametrize(("count", "bytes_held"), [(0, 2), (1, 9)])
def test_hardly_any_operators(count: int, bytes_held: int) -> None:
    graph = make_graph([set()] * count, [(7, -1, set(), True)], base_bytes=2)
    assert answer_of(graph).cost == bytes_held


def test_a_graph_that_contradicts_itself_is_refused() -> None:
    graph = training_step(3)
    graph.before[0] = len(graph) - 1
    with pytest.raises(ValueError, match="operator"):
        solve(graph, deadline=Deadline(1.0))


def weak_bound(graph: Graph, order: I64, *_: Any) -> Bound:
    return Bound(graph.base_bytes, -1)


def test_baselines_are_asked_once_and_only_where_they_may_help() -> None:
    asked: list[int] = []

    def baselines() -> list[Candidate]:
        asked.append(1)
        return baseline_orders(graph)

    graph = training_step(60, last=1)
    assert isinstance(solve(graph, deadline=Deadline(600.0), baselines=baselines), Solved)
    assert not asked  # updates placed early are as good as any order
    graph = random_graph(40)
    assert isinstance(solve(graph, deadline=Deadline(600.0), baselines=baselines), Solved)
    assert asked == [1]


def test_who_waits_for_a_bound_can_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread waits in a way that lets signal handlers run while bounds are computed."""
    deadline = Deadline(600.0)
    signal.signal(signal.SIGALRM, lambda *_: deadline.end())

    def slow(graph: Graph, order: I64, deadline: Deadline) -> Bound:
        assert threading.current_thread() is not threading.main_thread()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while not deadline.ended:
            time.sleep(0.01)
        return weak_bound(graph, order)

    monkeypatch.setattr(solve_module, "cut_bound", slow)
    try:
        assert isinstance(solve(random_graph(150), deadline=deadline), TimedOut)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_what_works_in_other_threads() -> None:
    deadline, ended = Deadline(600.0), threading.Event()

    def work() -> None:
        for _ in range(1000):
            if deadline.ended:
                break
            time.sleep(0.01)
        release.wait(300.0)
        ended.set()

    release = threading.Event()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        deadline.result_of(work)
    # Python must go on to know the thread, or it exits while native code runs in it.
    assert "memplan-search" in [thread.name for thread in threading.enumerate()]
    release.set()
    assert ended.wait(300.0)
