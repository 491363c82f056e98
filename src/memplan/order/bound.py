"""What no order can do without: proven lower bounds on the peak.

Whatever the order, what ran before operator v is a set that is closed under what must run before,
contains v's ancestors and none of its descendants. The least bytes of the values alive between such
a set and the rest are a minimum cut: a value pays once when its maker is in the set and one of its
users, or the end of the step, is not (the closures of Picard 1976). With what v makes and takes for
itself, that is a bound for v. Operators that hold no more in a known order than is already proved
cannot raise it and cost nothing.

Where the largest of these leaves room below the known peak, orders within a budget are narrowed
down: u cannot run before v if, with v after u, the cut of u is above the budget; what is forced so
raises the cut of v, and so on, until that is above the budget, too (`native/order/narrow.hpp`).

A bound comes with the flows that prove it; `check_bound` reads them without the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import memplan._native as _native
from memplan.order.evaluate import held
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.trace import I64

PIVOTS = 8
"""Operators of the largest cuts, from which orders are narrowed down."""
BISECTIONS = 12


@dataclass(frozen=True)
class Bound:
    """No order has a lower peak than `bytes`, which the certificate proves."""

    bytes: int
    certificate: Certificate


def lower_bound(graph: Graph, order: npt.ArrayLike, deadline: Deadline | None = None) -> Bound:
    """The best bound found in time. `order` is the best one known: the lower its peak, the less
    there is to do.

    Raises ValueError for what is no permutation, or values of 2^61 bytes and more together.
    """
    prover = _Prover(graph, deadline or Deadline())
    bytes_held = held(graph, order)
    pivots, best = prover.cuts(np.asarray(order, np.int64), bytes_held)
    return prover.narrowed(pivots[:PIVOTS], best, int(bytes_held.max(initial=graph.base_bytes)))


def cut_bound(graph: Graph, order: npt.ArrayLike, deadline: Deadline | None = None) -> Bound:
    """What takes little of `lower_bound`: the bounds of single operators."""
    prover = _Prover(graph, deadline or Deadline())
    return prover.cuts(np.asarray(order, np.int64), held(graph, order))[1]


class _Prover:
    def __init__(self, graph: Graph, deadline: Deadline) -> None:
        self.graph = graph
        self.native = _native.OrderCuts(
            graph.scratch, graph.before_start, graph.before, graph.bytes, graph.maker,
            graph.lasts.astype(np.uint8), graph.users_start, graph.users, graph.base_bytes,
        )  # fmt: skip
        self.deadline = deadline

    def cuts(self, rows: I64, bytes_held: I64) -> tuple[list[int], Bound]:
        """The operators whose cuts were looked at, those of the largest first, and the bound that
        follows from the largest, or from what is there at the step's start or end."""
        best = max(_at_start(self.graph), _at_end(self.graph), key=lambda bound: bound.bytes)
        first = np.argsort(-bytes_held, kind="stable")
        least = np.zeros(len(rows), np.int64)
        count = self.native.least(
            rows[first],
            bytes_held[first],
            best.bytes,
            self.deadline.left(),
            self.deadline.stop,
            least,
        )
        looked_at: I64 = rows[first][:count]
        pivots = [int(op) for op in looked_at[np.argsort(-least[:count], kind="stable")]]
        if pivots:
            best = max(best, self.prove(pivots[0], [], []), key=lambda bound: bound.bytes)
        return pivots, best

    def narrowed(self, pivots: Sequence[int], best: Bound, peak: int) -> Bound:
        """At least `best`: for each pivot that can raise it, the largest budget that is refuted."""
        for pivot in pivots:
            unrefuted, budget = peak, best.bytes
            for _ in range(BISECTIONS):
                if not best.bytes <= budget < unrefuted or self.deadline.passed:
                    break
                possible, before, after = self.native.narrow(
                    pivot, budget, self.deadline.left(), self.deadline.stop
                )
                if possible:
                    unrefuted = budget
                else:
                    proved = self.prove(pivot, before, after)
                    first = budget == best.bytes
                    best = max(best, proved, key=lambda bound: bound.bytes)
                    if first:  # it is worth the dearer ones
                        budget = peak - 1
                        continue
                budget = (best.bytes + unrefuted) // 2
        return best

    def prove(self, pivot: int, before: Sequence[int], after: Sequence[int]) -> Bound:
        """The bound from a pivot and what was forced, in the order found."""
        forced: list[Forced] = []
        proved: list[int] = []
        for number, op in enumerate(after):
            nbytes, flow = self.flow(op, [], [*after[:number], pivot])
            forced.append(Forced(pivot, op, flow))
            proved.append(nbytes)
        for number, op in enumerate(before):
            nbytes, flow = self.flow(op, [*before[:number], pivot], [])
            forced.append(Forced(op, pivot, flow))
            proved.append(nbytes)
        nbytes, flow = self.flow(pivot, before, after)
        return Bound(min([*proved, nbytes]), Certificate(tuple(forced), flow))

    def flow(self, op: int, before: Sequence[int], after: Sequence[int]) -> tuple[int, Flow]:
        graph = self.graph
        share, rest, back = (
            np.zeros(rows, np.int64) for rows in (len(graph.users), graph.values, len(graph.before))
        )
        nbytes = self.native.flow(
            op, np.array(before, np.int64), np.array(after, np.int64), share, rest, back
        )
        return nbytes, Flow(op, Amounts.of(share), Amounts.of(rest), Amounts.of(back))


def _at_start(graph: Graph) -> Bound:
    """What is there before the step and used, beside what lasts and so is always held."""
    used = np.flatnonzero((graph.maker < 0) & ~graph.lasts & (np.diff(graph.users_start) > 0))
    share = Amounts(graph.users_start[used], graph.bytes[used])
    none = Amounts.of(np.zeros(0, np.int64))
    flow = Flow(-1, share, none, none)
    return Bound(_always(graph) + int(graph.bytes[used].sum()), Certificate((), flow))


def _at_end(graph: Graph) -> Bound:
    """What lasts."""
    made = np.flatnonzero((graph.maker >= 0) & graph.lasts)
    none = Amounts.of(np.zeros(0, np.int64))
    flow = Flow(len(graph), none, Amounts(made, graph.bytes[made]), none)
    return Bound(_always(graph) + int(graph.bytes[made].sum()), Certificate((), flow))


def _always(graph: Graph) -> int:
    if not len(graph):
        return graph.base_bytes
    return graph.base_bytes + int(graph.bytes[(graph.maker < 0) & graph.lasts].sum())


@dataclass(frozen=True)
class Amounts:
    """Bytes by row of a column of the graph; rows that are not named have none."""

    rows: I64
    bytes: I64

    @classmethod
    def of(cls, column: I64) -> Amounts:
        rows = np.flatnonzero(column).astype(np.int64)
        return cls(rows, column[rows])


@dataclass(frozen=True)
class Flow:
    """A flow of bytes from what must have run before operator `op`, and from what is there before
    the step, to what must run after it.

    Each value hands its bytes to users, who answer for their being held as long as they have not
    run, and to the end of the step where it lasts; each operator hands what reaches it to its own
    values, or back to operators that must run before it.
    """

    op: int
    """-1: the start of the step; the number of operators: its end."""
    share: Amounts
    """By row of `Graph.users`: what a value hands to that user."""
    rest: Amounts
    """By value: what it hands to the end of the step."""
    back: Amounts
    """By row of `Graph.before`: what the later operator hands to the earlier one."""


@dataclass(frozen=True)
class Forced:
    """`earlier` runs before `later` in every order that holds less than the flow says: it is that
    of an operator if `later` ran first."""

    earlier: int
    later: int
    flow: Flow


@dataclass(frozen=True)
class Certificate:
    """Each `forced` holds given those before it, and the last flow given all of them: so no order
    holds less than the least of the flows."""

    forced: tuple[Forced, ...]
    flow: Flow
