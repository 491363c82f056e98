"""The simplest orders: program order, and the candidates of PyTorch Inductor.

The least of them is what `torch.compile` would take if it ordered whole steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from memplan.order.evaluate import peak, program_order
from memplan.order.inductor import inductor_orders
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.trace import I64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """An order, who made it (`program`, `lpmf`, `bfs`, `dfs`), and its peak."""

    name: str
    order: I64
    peak_bytes: int


def baseline_orders(graph: Graph, deadline: Deadline | None = None) -> list[Candidate]:
    """Program order first, then those of Inductor's candidates that were there in time.
    Without them, and with a word in the log, where this torch cannot be asked."""
    program = program_order(graph)
    found = [Candidate("program", program, peak(graph, program))]
    deadline = deadline or Deadline()
    if deadline.passed or len(graph) < 2:
        return found
    try:
        orders = inductor_orders(graph, deadline)
    except RuntimeError as error:
        log.warning("Inductor's orders are left out: %s", error)
        return found
    return [*found, *(Candidate(name, o, peak(graph, o)) for name, o in orders.items())]


def best(candidates: list[Candidate]) -> Candidate:
    """That of the least peak, the first of several."""
    return min(candidates, key=lambda candidate: candidate.peak_bytes)
