"""Updates of several parameters in one call of their optimizer.

A fused or foreach step of one parameter costs its host as much as one of hundreds. So a gradient
waits for later ones, as long as the bytes that it holds meanwhile do not raise the step's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from memplan.order.evaluate import held, lifetimes
from memplan.runtime.graph.dependencies import Operators
from memplan.runtime.graph.program import facts_of
from memplan.runtime.graph.update_nodes import TakeGradient
from memplan.types.graph import csr
from memplan.types.trace import I64

_TRIES = 3
"""At groups that are small enough, where whole blocks need more than what is asked for."""


def updated_together(
    operators: Operators, order: I64, peak: Callable[[Operators], int]
) -> Operators:
    """The operators with gradients that live until the last update of their group, which then does
    all of them (`TakeGradient.waits`). `peak`: of operators in this order; it is not raised."""
    most = peak(operators)
    limit = int(held(operators.graph, order).max(initial=0))
    for _ in range(_TRIES):
        groups = _groups(operators, order, limit)
        made = _grouped(operators, groups)
        above = peak(made) - most
        if above <= 0:
            for group in groups:
                for row in group[:-1]:
                    _taker(operators, row).waits = True
            return made
        limit -= above
    return operators


def _groups(operators: Operators, order: I64, limit: int) -> list[list[int]]:
    """Rows that are updated together, in their order; the last one does it. What is held while they
    wait stays within `limit`."""
    graph = operators.graph
    now = held(graph, order)
    sizes = _waiting_bytes(operators, order)
    groups: list[list[int]] = []
    waiting = scratch = place = 0
    for here, row in enumerate(order.tolist()):
        if row not in sizes:
            continue
        between = int(now[place:here].max(initial=0)) + waiting
        if not groups or max(between, int(now[here]) + waiting + scratch) > limit:
            groups.append([])
            waiting = scratch = 0
        groups[-1].append(row)
        waiting += sizes[row]
        scratch += int(graph.scratch[row])
        place = here + 1
    return groups


def _waiting_bytes(operators: Operators, order: I64) -> dict[int, int]:
    """By row: what an update holds that waits, of those that can."""
    graph = operators.graph
    place = np.argsort(order)
    written: dict[int, int] = {}
    """By storage: the place where it is written last."""
    for row, node in enumerate(operators.nodes):
        for storage in facts_of(node).writes:
            written[storage] = max(written.get(storage, -1), int(place[row]))
    _, stop = lifetimes(graph, order)
    known = dict(zip(operators.storages, zip(graph.bytes, stop, strict=True), strict=True))
    found: dict[int, int] = {}
    for row, node in enumerate(operators.nodes):
        if isinstance(node.target, TakeGradient) and node.target.can_wait:
            storage = _gradient(operators, row)
            if storage in known and written.get(storage, -1) < place[row]:
                size, until = known[storage]
                found[row] = int(size) * bool(until < len(graph))
    return found


def _grouped(operators: Operators, groups: Sequence[Sequence[int]]) -> Operators:
    graph = operators.graph
    added = np.zeros(len(graph), np.int64)
    value = {storage: number for number, storage in enumerate(operators.storages)}
    users = [set(graph.users_of(number).tolist()) for number in range(graph.values)]
    for *waiting, last in groups:
        for row in waiting:
            users[value[_gradient(operators, row)]].add(last)
            added[last] += graph.scratch[row]
            added[row] -= graph.scratch[row]
    users_start, rows = csr(users)
    changed = replace(graph, scratch=graph.scratch + added, users_start=users_start, users=rows)
    return replace(operators, graph=changed, scratch_high=operators.scratch_high + added)


def _taker(operators: Operators, row: int) -> TakeGradient:
    target = operators.nodes[row].target
    assert isinstance(target, TakeGradient)
    return target


def _gradient(operators: Operators, row: int) -> int:
    """The storage that a `TakeGradient` takes; -1 where it is not one alone."""
    _, gradient = operators.nodes[row].all_input_nodes
    shown = facts_of(gradient).shows
    return -1 if shown is None else shown
