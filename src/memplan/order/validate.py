"""Checks an order and its peak by running it operator by operator.

It shares no code with the solvers or with `evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.types.graph import Graph


def order_fault(graph: Graph, order: Sequence[int], peak_bytes: int | None = None) -> str:
    """Empty if every operator runs once, after those that it depends on, and the peak is
    `peak_bytes` (not checked for None); otherwise the first fault found."""
    ran: set[int] = set()
    for op in order:
        if not 0 <= op < len(graph):
            return f"there is no operator {op}"
        if op in ran:
            return f"operator {op} runs twice"
        for needed in graph.before_of(op).tolist():
            if needed not in ran:
                return f"operator {op} runs before operator {needed}"
        ran.add(op)
    if len(ran) != len(graph):
        missing = min(set(range(len(graph))) - ran)
        return f"operator {missing} does not run"
    if peak_bytes is not None:
        most = slow_peak(graph, order)
        if most != peak_bytes:
            return f"the peak is {most} bytes, not {peak_bytes}"
    return ""


def slow_peak(graph: Graph, order: Sequence[int]) -> int:
    """The peak of a permutation of the operators, from the set of values alive at each."""
    waiting: dict[int, set[int]] = {}
    uses: list[list[int]] = [[] for _ in range(len(graph))]
    makes: list[list[int]] = [[] for _ in range(len(graph))]
    alive: dict[int, int] = {}
    for value in range(graph.values):
        users = [int(user) for user in graph.users_of(value)]
        maker = int(graph.maker[value])
        waiting[value] = {*users, maker} if maker >= 0 else set(users)
        if graph.lasts[value]:
            waiting[value].add(len(graph))  # nobody: it never ends
        for user in waiting[value] - {maker, len(graph)}:
            uses[user].append(value)
        if maker >= 0:
            makes[maker].append(value)
        elif waiting[value]:
            alive[value] = int(graph.bytes[value])
    now, most = graph.base_bytes + sum(alive.values()), graph.base_bytes
    for op in order:
        for value in makes[op]:
            alive[value] = int(graph.bytes[value])
            now += alive[value]
        most = max(most, now + int(graph.scratch[op]))
        for value in [*makes[op], *uses[op]]:
            waiting[value].discard(op)
            if not waiting[value]:
                now -= alive.pop(value)
    return most
