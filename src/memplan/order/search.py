"""The native search for a lower peak (`native/order/search.hpp`): docs/order.md, "The search"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import memplan._native as _native
from memplan.order.evaluate import peak
from memplan.types.deadline import Deadline
from memplan.types.errors import InternalError
from memplan.types.graph import Graph
from memplan.types.trace import I64

_NODES = 500  # sets of operators looked at before one that holds more is taken


@dataclass(frozen=True)
class Improved:
    """What the search makes of an order."""

    order: I64
    peak_bytes: int
    bound_bytes: int
    """No order has a lower peak, as far as the search saw."""


def improve(graph: Graph, order: npt.ArrayLike, floor: int, deadline: Deadline) -> Improved:
    """An order whose peak is no higher, and lower where the search finds the way.

    `floor`: bytes below which no peak is known to be possible. The same input gives the same
    answer unless time runs out. Raises ValueError for what is no order of the graph.
    """
    rows = np.array(order, np.int64)
    answer = deadline.result_of(
        lambda: _native.improve_order(
            graph.scratch, graph.before_start, graph.before, graph.bytes, graph.maker,
            graph.lasts.astype(np.uint8), graph.users_start, graph.users, graph.base_bytes,
            rows, floor, _NODES, deadline.left(), deadline.stop,
        )
    )  # fmt: skip
    if peak(graph, rows) != answer[0]:
        raise InternalError(f"the order's peak is {peak(graph, rows)}, not {answer[0]} as was said")
    return Improved(rows, *answer)
