"""The simplest orders: program order, and the candidates of PyTorch Inductor.

The one with the lowest peak is what `torch.compile` would choose if it ordered whole steps.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from memplan.order.evaluate import peak, program_order
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.trace import I64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """An order, where it is from (`program`, `lpmf`, `bfs` or `dfs`), and its peak."""

    name: str
    order: I64
    peak_bytes: int


def baseline_orders(graph: Graph, deadline: Deadline | None = None) -> list[Candidate]:
    """Program order, then those of Inductor's candidates that are found before the deadline.

    Where this release of PyTorch has other functions, the candidates are left out and a warning is
    logged.
    """
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
    """The candidate with the lowest peak, the first of several."""
    return min(candidates, key=lambda candidate: candidate.peak_bytes)


NAMES = ("lpmf", "bfs", "dfs")
_BYTES_A_CALL = 1024  # of stack that a recursion of Python may take, generously
_MOST_STACK = 512 << 20


class InterruptedSortError(Exception):
    """The deadline came while a function of Inductor ran."""


@dataclass
class _BufferPlan:
    """What Inductor calls `mpi_buffer`."""

    size_alloc: int
    size_free: int
    succ_nodes: dict[_Node, None] = field(default_factory=dict)


@dataclass(eq=False)
class _Buffer:
    name: str
    mpi_buffer: _BufferPlan

    def get_name(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Dependency:
    name: str


class _NodePlan:
    """What Inductor calls `mpi_node`. Inductor's functions read `succ_nodes` for every operator
    that they place, so this is where a passed deadline ends them."""

    def __init__(self, index: int, size: int, deadline: Deadline) -> None:
        self.index = index
        self.size = size
        self._deadline = deadline
        self.pred_buffers: dict[_Buffer, None] = {}
        self.pred_nodes: dict[_Node, None] = {}
        self.followers: dict[_Node, None] = {}

    @property
    def succ_nodes(self) -> dict[_Node, None]:
        if self._deadline.passed:
            raise InterruptedSortError
        return self.followers


@dataclass(eq=False)
class _Node:
    index: int
    mpi_node: _NodePlan
    outputs: list[_Buffer] = field(default_factory=list)
    unmet_dependencies: list[_Dependency] = field(default_factory=list)

    def get_name(self) -> str:
        return f"op{self.index}"

    def get_outputs(self) -> list[_Buffer]:
        return self.outputs

    def get_buffer_names(self) -> list[str]:
        return [self.get_name()]


def inductor_orders(graph: Graph, deadline: Deadline) -> dict[str, I64]:
    """The orders that Inductor would choose from, by name (`lpmf`, `bfs`, `dfs`). Those that are
    not found before the deadline are left out.

    `torch._inductor.memory` sorts the nodes of its scheduler by three rules: least peak memory
    first (Zhang et al., DAC 2006; LESCEA uses it, too), breadth first, depth first. Its functions
    use few attributes of a node, so they are called here with objects that have just these. A value
    becomes a buffer, and scratch memory a buffer without readers. Values that exist before the step
    and last to its end are left out, as in Inductor: they are inputs that cannot be freed.

    The functions are private; they are called as in torch 2.11 to 2.13. Raises RuntimeError where
    this release has others.
    """
    try:
        from torch._inductor import memory

        functions = {name: getattr(memory, f"topological_sort_{name}") for name in NAMES}
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"PyTorch Inductor has not the functions: {error}") from error
    found: dict[str, I64] = {}

    def call_all() -> None:
        for name in NAMES:
            nodes, buffers, inputs, outputs = _stand_ins(graph, deadline)
            function = functions[name]
            result = (
                function(nodes, inputs, buffers, outputs) if name == "lpmf" else function(nodes)
            )
            found[name] = np.array([node.index for node in result], np.int64)

    _with_deep_stack(call_all, len(graph), deadline)
    return found


def _stand_ins(
    graph: Graph, deadline: Deadline
) -> tuple[list[_Node], dict[str, _Buffer], dict[str, _Buffer], set[str]]:
    """Nodes, buffers by name, inputs that can be freed by name, and names of outputs."""
    size = graph.scratch.copy()
    np.add.at(size, graph.maker[graph.maker >= 0], graph.bytes[graph.maker >= 0])
    nodes = [_Node(op, _NodePlan(op, nbytes, deadline)) for op, nbytes in enumerate(size.tolist())]
    buffers: dict[str, _Buffer] = {}
    inputs: dict[str, _Buffer] = {}
    outputs: set[str] = set()
    for value in range(graph.values):
        nbytes, maker = int(graph.bytes[value]), int(graph.maker[value])
        users = graph.users_of(value).tolist()
        if maker < 0 and (graph.lasts[value] or not users):
            continue
        buffer = _Buffer(f"value{value}", _BufferPlan(nbytes, nbytes))
        (inputs if maker < 0 else buffers)[buffer.name] = buffer
        if maker >= 0:
            nodes[maker].outputs.append(buffer)
        if graph.lasts[value]:
            outputs.add(buffer.name)
        for user in users:
            buffer.mpi_buffer.succ_nodes[nodes[user]] = None
            nodes[user].mpi_node.pred_buffers[buffer] = None
    for op in np.flatnonzero(graph.scratch).tolist():
        nbytes = int(graph.scratch[op])
        buffer = _Buffer(f"scratch{op}", _BufferPlan(nbytes, nbytes))
        buffers[buffer.name] = buffer
        nodes[op].outputs.append(buffer)
    for op, node in enumerate(nodes):
        for needed in graph.before_of(op).tolist():
            node.mpi_node.pred_nodes[nodes[needed]] = None
            nodes[needed].mpi_node.followers[node] = None
            node.unmet_dependencies.append(_Dependency(nodes[needed].get_name()))
    return nodes, buffers, inputs, outputs


def _with_deep_stack(call: Callable[[], None], depth: int, deadline: Deadline) -> None:
    """Run in a thread whose stack is large enough for a recursion through the whole graph."""
    limit, size = sys.getrecursionlimit(), threading.stack_size()
    threading.stack_size(min(_MOST_STACK, 16 * _BYTES_A_CALL * (depth + 1024)))
    sys.setrecursionlimit(max(limit, 4 * depth + 1000))
    try:
        deadline.result_of(call)
    except InterruptedSortError:
        pass
    except Exception as error:
        raise RuntimeError(f"this version of PyTorch Inductor does not sort: {error!r}") from error
    finally:
        threading.stack_size(size)
        sys.setrecursionlimit(limit)
