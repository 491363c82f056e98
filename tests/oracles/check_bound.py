"""What a certificate proves, by reading it: shares no code with the solver.

Why a flow is a proof: let D be any set that can have run before operator v. All that flows out of D
but not back in, flows out of what must have run before v and of what is there before the step,
since every other operator hands on what it gets. It leaves D only from a value made in D to a user
outside, or to the end: bytes that are held while v runs, and no value hands out more than it has.
It cannot leave D backwards, as D is closed.

Why forced places are one: an order that holds less than each flow cannot have the two operators the
other way round, or it would hold what the flow says. So its sets keep to them, too.
"""

from __future__ import annotations

from memplan.types.graph import Graph
from tests.oracles.certificate import Amounts, Certificate, Flow

Pairs = list[tuple[int, int]]
"""Operators of which the first runs before the second."""


def check_bound(graph: Graph, certificate: Certificate) -> int:
    """Bytes that every order's peak reaches, as far as the certificate proves it.

    Raises ValueError, with the reason, for what proves nothing.
    """
    if not len(graph):
        return graph.base_bytes
    pairs: Pairs = [
        (needed, op) for op in range(len(graph)) for needed in graph.before_of(op).tolist()
    ]
    proved: list[int] = []
    for forced in certificate.forced:
        _check_operators(graph, forced.earlier, forced.later)
        proved.append(_bytes_proved(graph, forced.flow, [*pairs, (forced.later, forced.earlier)]))
        pairs.append((forced.earlier, forced.later))
    proved.append(_bytes_proved(graph, certificate.flow, pairs))
    return min(proved)


def _check_operators(graph: Graph, *ops: int) -> None:
    for op in ops:
        if not 0 <= op < len(graph):
            raise ValueError(f"there is no operator {op}")


def _bytes_proved(graph: Graph, flow: Flow, pairs: Pairs) -> int:
    """What is held at least while `flow.op` runs, if operators keep to the pairs."""
    everything = set(range(len(graph)))
    total = graph.base_bytes
    if flow.op == -1:
        before, after = set[int](), everything
    elif flow.op == len(graph):
        before, after = everything, set[int]()
    else:
        _check_operators(graph, flow.op)
        before = _reached(flow.op, [(later, earlier) for earlier, later in pairs])
        after = _reached(flow.op, pairs) | {flow.op}
        if before & after:
            raise ValueError(f"operator {flow.op} would have to run before and after the same")
        total += int(graph.scratch[flow.op])
    surplus = _surplus(graph, flow)
    total += surplus[-1] + sum(surplus[op] for op in before)
    for op in everything - before - after:
        if surplus[op]:
            raise ValueError(f"operator {op} does not hand on what it gets: {surplus[op]} bytes")
    for value in range(graph.values):
        maker = int(graph.maker[value])
        if (maker >= 0 and maker == flow.op) or (maker == -1 and graph.lasts[value]):
            total += int(graph.bytes[value])
    return total


def _surplus(graph: Graph, flow: Flow) -> list[int]:
    """What each operator hands out beyond what it gets; in the last place what is there before."""
    result = [0] * (len(graph) + 1)
    handed = dict.fromkeys(range(graph.values), 0)
    value_of = {
        row: value
        for value in range(graph.values)
        for row in range(int(graph.users_start[value]), int(graph.users_start[value + 1]))
    }
    later_of = {
        row: op
        for op in range(len(graph))
        for row in range(int(graph.before_start[op]), int(graph.before_start[op + 1]))
    }
    for row, nbytes in _checked(flow.share, len(graph.users)):
        handed[value_of[row]] += nbytes
        result[int(graph.users[row])] -= nbytes
    for value, nbytes in _checked(flow.rest, graph.values):
        if not graph.lasts[value]:
            raise ValueError(f"value {value} does not last")
        handed[value] += nbytes
    for value, nbytes in handed.items():
        if nbytes > graph.bytes[value]:
            raise ValueError(f"value {value} hands out {nbytes} bytes, more than it has")
        if nbytes and graph.maker[value] == -1 and graph.lasts[value]:
            raise ValueError(f"value {value} is held in any case, and counted without a flow")
        result[int(graph.maker[value])] += nbytes
    for row, nbytes in _checked(flow.back, len(graph.before)):
        result[later_of[row]] += nbytes
        result[int(graph.before[row])] -= nbytes
    return result


def _checked(amounts: Amounts, rows: int) -> Pairs:
    """Rows with their bytes, where they can be."""
    pairs = list(zip(amounts.rows.tolist(), amounts.bytes.tolist(), strict=True))
    if len({row for row, _ in pairs}) != len(pairs):
        raise ValueError("a row is named twice")
    for row, nbytes in pairs:
        if not 0 <= row < rows:
            raise ValueError(f"there is no row {row}")
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes flow")
    return pairs


def _reached(op: int, pairs: Pairs) -> set[int]:
    """All that the pairs lead to from `op`."""
    onward: dict[int, list[int]] = {}
    for first, second in pairs:
        onward.setdefault(first, []).append(second)
    found: set[int] = set()
    waiting = [op]
    while waiting:
        for other in onward.get(waiting.pop(), []):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found
