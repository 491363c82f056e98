"""What a certificate proves, by reading it: shares no code with the solver.

Why it is a proof: let D be any set that can have run before operator v. All that flows out of D but
not back in, flows out of the ancestors of v and of what is there before the step, since every other
operator hands on what it gets. It leaves D only from a value made in D to a user outside, or to the
end: bytes that are held while v runs, and no value hands out more than it has. It cannot leave D
backwards, as D is closed.
"""

from __future__ import annotations

from memplan.order.bound import Certificate
from memplan.types.graph import Graph


def check_bound(graph: Graph, certificate: Certificate) -> int:
    """Bytes that every order's peak reaches, as far as the certificate proves it.

    Raises ValueError, with the reason, for what proves nothing.
    """
    if certificate.op == -1:
        return graph.base_bytes
    if not 0 <= certificate.op < len(graph):
        raise ValueError(f"there is no operator {certificate.op}")
    surplus = _surplus(graph, certificate)
    before = _ancestors(graph, certificate.op)
    after = _descendants(graph, certificate.op)
    total = graph.base_bytes + int(graph.scratch[certificate.op]) + surplus[-1]
    for op in range(len(graph)):
        if op in before:
            total += surplus[op]
        elif op not in after and surplus[op] != 0:
            raise ValueError(f"operator {op} does not hand on what it gets: {surplus[op]} bytes")
    for value in range(graph.values):
        maker = int(graph.maker[value])
        if maker == certificate.op or (maker == -1 and graph.lasts[value]):
            total += int(graph.bytes[value])
    return total


def _surplus(graph: Graph, certificate: Certificate) -> list[int]:
    """What each operator hands out beyond what it gets; in the last place what is there before."""
    result = [0] * (len(graph) + 1)
    share, rest, back = (
        column.tolist() for column in (certificate.share, certificate.rest, certificate.back)
    )
    if (len(share), len(rest), len(back)) != (len(graph.users), graph.values, len(graph.before)):
        raise ValueError("the columns do not fit the graph")
    if min([0, *share, *rest, *back]) < 0:
        raise ValueError("negative bytes flow")
    users, before = graph.users.tolist(), graph.before.tolist()
    for value in range(graph.values):
        maker = int(graph.maker[value])
        handed = rest[value]
        if handed and not graph.lasts[value]:
            raise ValueError(f"value {value} does not last")
        for row in range(int(graph.users_start[value]), int(graph.users_start[value + 1])):
            handed += share[row]
            result[users[row]] -= share[row]
        if handed > graph.bytes[value]:
            raise ValueError(f"value {value} hands out {handed} bytes, more than it has")
        if handed and maker == -1 and graph.lasts[value]:
            raise ValueError(f"value {value} is always held: it is counted without a flow")
        result[maker] += handed
    for op in range(len(graph)):
        for row in range(int(graph.before_start[op]), int(graph.before_start[op + 1])):
            result[op] += back[row]
            result[before[row]] -= back[row]
    return result


def _ancestors(graph: Graph, op: int) -> set[int]:
    found: set[int] = set()
    waiting = [op]
    while waiting:
        for needed in graph.before_of(waiting.pop()).tolist():
            if needed not in found:
                found.add(needed)
                waiting.append(needed)
    return found


def _descendants(graph: Graph, op: int) -> set[int]:
    """With the operator itself."""
    found = {op}
    for other in range(op + 1, len(graph)):  # program order keeps to the dependencies
        if any(needed in found for needed in graph.before_of(other).tolist()):
            found.add(other)
    return found
