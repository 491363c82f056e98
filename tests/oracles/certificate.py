"""The flows that prove a bound of `memplan.order.bound`, written down for `check_bound`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplan.order.bound import Bound, _Prover
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.trace import I64


@dataclass(frozen=True)
class Amounts:
    """Bytes by row of a column of the graph; rows that are left out have none."""

    rows: I64
    bytes: I64

    @classmethod
    def of(cls, column: I64) -> Amounts:
        rows = np.flatnonzero(column).astype(np.int64)
        return cls(rows, column[rows])


@dataclass(frozen=True)
class Flow:
    """A flow of bytes that proves how much is held while operator `op` runs.

    It starts at the operators that must have run before and at the values that exist before the
    step, and ends at the operators that must run later. Each value passes its bytes on to its
    users, because it is held until all of them have run, and to the end of the step if it lasts.
    Each operator passes what reaches it on to the values that it makes, or back to operators that
    must run before it.
    """

    op: int
    """-1: the start of the step; the number of operators: its end."""
    share: Amounts
    """Bytes that a value passes on to a user, by row of `Graph.users`."""
    rest: Amounts
    """Bytes that each value passes on to the end of the step."""
    back: Amounts
    """Bytes that the later operator passes back to the earlier one, by row of `Graph.before`."""


@dataclass(frozen=True)
class Forced:
    """A pair of operators: `earlier` runs before `later` in every order with a lower peak than the
    flow proves. The flow is that of an operator if `later` ran first."""

    earlier: int
    later: int
    flow: Flow


@dataclass(frozen=True)
class Certificate:
    """Each forced pair follows from those before it, and the last flow uses all of them. So no
    order has a lower peak than the least of the flows."""

    forced: tuple[Forced, ...]
    flow: Flow


def certificate_of(graph: Graph, bound: Bound) -> Certificate:
    """The certificate of a bound of this graph."""
    pivot, before, after = bound.pivot, bound.before, bound.after
    if pivot in (-1, len(graph)):
        return Certificate((), _at_an_end(graph, pivot))
    forced = [
        Forced(pivot, op, _flow(graph, op, [], [*after[:number], pivot]))
        for number, op in enumerate(after)
    ]
    forced += [
        Forced(op, pivot, _flow(graph, op, [*before[:number], pivot], []))
        for number, op in enumerate(before)
    ]
    return Certificate(tuple(forced), _flow(graph, pivot, before, after))


def _flow(graph: Graph, op: int, before: Sequence[int], after: Sequence[int]) -> Flow:
    share, rest, back = (
        np.zeros(rows, np.int64) for rows in (len(graph.users), graph.values, len(graph.before))
    )
    native = _Prover(graph, Deadline()).native
    native.flow(op, np.array(before, np.int64), np.array(after, np.int64), share, rest, back)
    return Flow(op, Amounts.of(share), Amounts.of(rest), Amounts.of(back))


def _at_an_end(graph: Graph, op: int) -> Flow:
    """From what is there before the step, or to what lasts beyond it."""
    none = Amounts.of(np.zeros(0, np.int64))
    if op == -1:
        used = (graph.maker < 0) & ~graph.lasts & (np.diff(graph.users_start) > 0)
        return Flow(op, Amounts(graph.users_start[:-1][used], graph.bytes[used]), none, none)
    made = np.flatnonzero((graph.maker >= 0) & graph.lasts)
    return Flow(op, none, Amounts(made, graph.bytes[made]), none)
