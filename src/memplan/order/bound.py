"""What no order can do without: proven lower bounds on the peak.

Whatever the order, what ran before operator v is a set that is closed under what must run before,
contains v's ancestors and none of its descendants. The least bytes of the values alive between such
a set and the rest are a minimum cut: a value pays once when its maker is in the set and one of its
users, or the end of the step, is not (the project selection of Picard 1976; on each side of the cut
stands what must). With what v makes and takes for itself, that is a bound for v; the largest of
them is one for the peak. Operators that hold no more in a known order than is already proved cannot
raise it and cost nothing.

A bound comes with the flow that proves it; `check_bound` reads it without the solver.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import memplan._native as _native
from memplan.order.evaluate import held
from memplan.types.graph import Graph
from memplan.types.trace import I64


@dataclass(frozen=True)
class Certificate:
    """A flow of bytes that reaches operator `op`, in columns beside the graph's.

    Each value hands its bytes to users, who answer for their being held as long as they have not
    run, and to the end of the step where it lasts; each operator hands what reaches it to its own
    values, or back to operators that must run before it.
    """

    op: int
    """-1: without any operator, for what is held in any case."""
    share: I64
    """By row of `Graph.users`: bytes that a value hands to that user."""
    rest: I64
    """By value: bytes that it hands to the end of the step."""
    back: I64
    """By row of `Graph.before`: bytes that the later operator hands to the earlier one."""


@dataclass(frozen=True)
class Bound:
    """No order has a lower peak than `bytes`, which the certificate proves."""

    bytes: int
    certificate: Certificate
    cuts: int = 0
    """How many operators had to be looked at."""


def lower_bound(
    graph: Graph,
    order: npt.ArrayLike,
    *,
    seconds: float = 1e9,
    cancel: npt.NDArray[np.uint8] | None = None,
) -> Bound:
    """The best bound found within `seconds`, or until `cancel[0]` is set. `order` is the best one
    known: the lower its peak, the fewer cuts are needed.

    Raises ValueError for what is no permutation, or values of 2^61 bytes and more together.
    """
    rows = np.asarray(order, np.int64)
    bytes_held = held(graph, rows)
    first = np.argsort(-bytes_held, kind="stable")
    cuts = open_cuts(graph)
    flag = np.zeros(1, np.uint8) if cancel is None else cancel
    floor = graph.base_bytes - 1
    _, op, count = cuts.best(rows[first], bytes_held[first], floor, seconds, flag)
    certificate = Certificate(
        op,
        np.zeros(len(graph.users), np.int64),
        np.zeros(graph.values, np.int64),
        np.zeros(len(graph.before), np.int64),
    )
    if op < 0:
        return Bound(graph.base_bytes, certificate, count)
    nbytes = cuts.flow(op, certificate.share, certificate.rest, certificate.back)
    return Bound(nbytes, certificate, count)


def open_cuts(graph: Graph) -> _native.OrderCuts:
    return _native.OrderCuts(
        graph.scratch, graph.before_start, graph.before, graph.bytes, graph.maker,
        graph.lasts.astype(np.uint8), graph.users_start, graph.users, graph.base_bytes,
    )  # fmt: skip
