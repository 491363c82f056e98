"""Updates of several parameters in one call of their optimizer.

The host needs as much time to start a fused or foreach step of one parameter as of hundreds. So an
update is postponed to a later one, as long as its waiting gradient does not raise the step's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from memplan.order.evaluate import held, lifetimes
from memplan.runtime.graph.operator_graph import OperatorGraph
from memplan.runtime.graph.program import facts_of
from memplan.runtime.graph.update_nodes import TakeGradient
from memplan.types.graph import csr
from memplan.types.trace import I64

_TRIES = 3
"""Attempts to form groups. The first may be too large where the allocator's blocks are larger than
the bytes that are asked for."""


def group_updates(
    operators: OperatorGraph, order: I64, peak: Callable[[OperatorGraph], int]
) -> OperatorGraph:
    """Operators in which the last update of each group does all of its updates, and gradients of
    the group live until then (`TakeGradient.waits`).

    `peak` gives the peak of operators in this order, in bytes; it does not rise.
    """
    most = peak(operators)
    limit = int(held(operators.graph, order).max(initial=0))
    for _ in range(_TRIES):
        groups = _groups(operators, order, limit)
        made = _grouped(operators, groups)
        above = peak(made) - most
        if above <= 0:
            for group in groups:
                for row in group[:-1]:
                    _gradient_taker(operators, row).waits = True
            return made
        limit -= above
    return operators


def _groups(operators: OperatorGraph, order: I64, limit: int) -> list[list[int]]:
    """Rows whose updates the last row of each group does, in their order. While gradients wait, at
    most `limit` bytes are held."""
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


def _waiting_bytes(operators: OperatorGraph, order: I64) -> dict[int, int]:
    """Bytes that an update holds while it waits, by the row of each update that can wait."""
    graph = operators.graph
    place = np.argsort(order)
    written: dict[int, int] = {}
    """The place of the last write of each storage."""
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


def _grouped(operators: OperatorGraph, groups: Sequence[Sequence[int]]) -> OperatorGraph:
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


def _gradient_taker(operators: OperatorGraph, row: int) -> TakeGradient:
    target = operators.nodes[row].target
    assert isinstance(target, TakeGradient)
    return target


def _gradient(operators: OperatorGraph, row: int) -> int:
    """The storage of the gradient that a `TakeGradient` uses; -1 where it is not a single one."""
    _, gradient = operators.nodes[row].all_input_nodes
    shown = facts_of(gradient).storage
    return -1 if shown is None else shown
