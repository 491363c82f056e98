"""Proven lower bounds on the peak of every order.

Consider the operators that ran before operator v, in any order. They include all ancestors of v and
none of its descendants, and with each operator its own ancestors: a closure (Picard 1976). The
values alive between such a set and the rest were made inside of it and are used outside, or last to
the end of the step. The least bytes of such values over all closures are a minimum cut. Together
with the results and scratch memory of v, they are a lower bound for the peak. Operators that hold
no more in a known order than is already proved cannot raise the bound, and are skipped.

Where the largest of these bounds is below the known peak, the orders within some budget are
narrowed down. If the cut of u would be above the budget were v to run before u, then u must run
before v. Such forced pairs raise the cut of v, which forces more pairs, until the cut of v itself
is above the budget: no order keeps within it (`native/order/narrow.hpp`).

The flows of these cuts prove a bound. The tests write them down and check them without the solver
(`tests/oracles/check_bound.py`).
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
"""Number of operators with the largest cuts for which orders are narrowed down."""
BISECTIONS = 12


@dataclass(frozen=True)
class Bound:
    """No order has a lower peak than `bytes`, as the cut of an operator shows."""

    bytes: int
    pivot: int
    """The operator; -1: the start of the step; the number of operators: its end."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    """Operators that every order with a lower peak has before and after the pivot, in the order in
    which they were found."""


def lower_bound(graph: Graph, order: npt.ArrayLike, deadline: Deadline | None = None) -> Bound:
    """The best bound found before the deadline. `order` is the best one known: the lower its peak,
    the less work is left.

    Raises ValueError if `order` is no permutation, or if all values together have 2^61 bytes or
    more.
    """
    prover = _Prover(graph, deadline or Deadline())
    bytes_held = held(graph, order)
    pivots, best = prover.cuts(np.asarray(order, np.int64), bytes_held)
    return prover.narrowed(pivots[:PIVOTS], best, int(bytes_held.max(initial=graph.base_bytes)))


def cut_bound(graph: Graph, order: npt.ArrayLike, deadline: Deadline | None = None) -> Bound:
    """The quick part of `lower_bound`: the bounds of single operators."""
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
        """The operators whose cuts were computed, the largest cut first, and the best bound: from
        the largest cut, or from the values that exist at the start or end of the step."""
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
        """At least `best`: the largest budget that some pivot proves to be impossible."""
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
                    if first:  # this pivot raises the bound, so the costlier budgets are tried
                        budget = peak - 1
                        continue
                budget = (best.bytes + unrefuted) // 2
        return best

    def prove(self, pivot: int, before: Sequence[int], after: Sequence[int]) -> Bound:
        """The bound from a pivot and forced pairs, in the order in which they were found."""
        proved = [self.flow(op, [], [*after[:n], pivot]) for n, op in enumerate(after)]
        proved += [self.flow(op, [*before[:n], pivot], []) for n, op in enumerate(before)]
        proved.append(self.flow(pivot, before, after))
        return Bound(min(proved), pivot, tuple(before), tuple(after))

    def flow(self, op: int, before: Sequence[int], after: Sequence[int]) -> int:
        graph = self.graph
        counts = (len(graph.users), graph.values, len(graph.before))
        flows = [np.zeros(count, np.int64) for count in counts]
        return self.native.flow(op, np.array(before, np.int64), np.array(after, np.int64), *flows)


def _at_start(graph: Graph) -> Bound:
    """The bound from the values that exist before the step and are used in it."""
    used = (graph.maker < 0) & ~graph.lasts & (np.diff(graph.users_start) > 0)
    return Bound(_always(graph) + int(graph.bytes[used].sum()), -1)


def _at_end(graph: Graph) -> Bound:
    """The bound from the values that last to the end of the step."""
    made = (graph.maker >= 0) & graph.lasts
    return Bound(_always(graph) + int(graph.bytes[made].sum()), len(graph))


def _always(graph: Graph) -> int:
    if not len(graph):
        return graph.base_bytes
    return graph.base_bytes + int(graph.bytes[(graph.maker < 0) & graph.lasts].sum())
