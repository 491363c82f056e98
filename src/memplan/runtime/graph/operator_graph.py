"""A captured step as a `Graph`: which operator depends on which, and how long each value lives.

Views, elements of results and arithmetic of Python numbers are no operators of this graph: they
allocate nothing and run right before the operator that needs them (`schedule`). One operator
depends on another because it reads its result, because one of them writes a storage that the other
reads or writes, or because both belong to one chain, such as that of random numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from memplan.runtime.graph.program import MemplanOp, Program, facts_of, is_element
from memplan.types.graph import Graph, csr
from memplan.types.trace import I64


@dataclass(frozen=True, eq=False)
class OperatorGraph:
    """A program's graph, with the node of each operator."""

    graph: Graph
    nodes: list[fx.Node]
    """The node of each operator."""
    storages: list[int]
    """The index in `Program.storages` of each value."""
    program: Program
    scratch_high: I64
    """`Graph.scratch`, with the largest workspaces that libraries may choose."""

    @property
    def held(self) -> list[int]:
        """The blocks, in bytes, that sum up to the graph's `base_bytes`."""
        program = self.program
        lasting = sorted(_lasting(program) & set(program.inputs))
        inputs = [program.storages[index].bytes for index in lasting]
        return [*inputs, *program.held, *program.workspaces]

    def schedule(self, order: Sequence[int] | I64) -> list[fx.Node]:
        """All nodes but placeholders and output, with the program's operators in `order`."""
        placed: dict[fx.Node, None] = dict.fromkeys(self.program.placeholders)

        def place(node: fx.Node) -> None:
            if node not in placed:
                for needed in node.all_input_nodes:
                    place(needed)
                put(node)

        def put(node: fx.Node) -> None:
            """Elements of an operator's result follow at once: while the tuple exists, it keeps all
            of them alive."""
            placed[node] = None
            for user in node.users if _is_operator(node) or is_element(node) else ():
                if user.target is operator.getitem and user not in placed:
                    put(user)

        for op in order:
            place(self.nodes[int(op)])
        for node in self.program.output.all_input_nodes:
            place(node)
        return [node for node in placed if node.op != "placeholder"]


def operator_graph(program: Program) -> OperatorGraph:
    """The graph of a program, with an operator for each node that runs a kernel, in program order.

    Inputs that are alive at the end are part of `Graph.base_bytes`.
    """
    graph = program.graph_module.graph
    nodes = [node for node in graph.nodes if _is_operator(node)]
    row = {node: number for number, node in enumerate(nodes)}
    before = _dependencies(graph, row)
    lasting = _lasting(program)
    used: dict[int, list[int]] = {}
    makers: dict[int, int] = {}
    for number, node in enumerate(nodes):
        facts = facts_of(node)
        makers.update(dict.fromkeys(facts.makes, number))
        for index in {*facts.reads, *facts.writes} - set(facts.makes):
            used.setdefault(index, []).append(number)
    inputs = set(program.inputs) - {-1}
    base = program.base_bytes + sum(program.storages[index].bytes for index in inputs & lasting)
    values = [*sorted(inputs - lasting), *makers]
    before_start, before_rows = csr([before[number] for number in range(len(nodes))])
    users_start, users = csr([used.get(index, []) for index in values])
    made = Graph(
        name=[str(node.target) for node in nodes],
        scratch=np.array([facts_of(node).memory.expected for node in nodes], np.int64),
        before_start=before_start,
        before=before_rows,
        bytes=np.array([program.storages[index].bytes for index in values], np.int64),
        maker=np.array([makers.get(index, -1) for index in values], np.int64),
        lasts=np.array([index in lasting for index in values], np.bool_),
        users_start=users_start,
        users=users,
        base_bytes=base,
        value_name=[program.storages[index].name for index in values],
    )
    made.check()
    high = np.array([facts_of(node).memory.high for node in nodes], np.int64)
    return OperatorGraph(made, nodes, values, program, high)


def _is_operator(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output") and not facts_of(node).no_kernel


def is_barrier(node: fx.Node) -> bool:
    """Whether no other node may move across this one."""
    return isinstance(node.target, MemplanOp) and node.target.barrier


def _dependencies(graph: fx.Graph, row: dict[fx.Node, int]) -> list[set[int]]:
    """The operators that must run before each one, without some that others imply."""
    makers: dict[fx.Node, set[int]] = {}
    """The operators whose results a node shows, through views and arithmetic of numbers."""
    written: dict[int, int] = {}
    read: dict[int, list[int]] = {}
    chains: dict[str, int] = {}
    before: list[set[int]] = []
    barrier: int | None = None
    for node in graph.nodes:
        needs = set[int]().union(*(makers[one] for one in node.all_input_nodes))
        makers[node] = needs
        if node not in row:
            continue
        number, facts = row[node], facts_of(node)
        makers[node] = {number}
        needs.update(written[index] for index in (*facts.reads, *facts.writes) if index in written)
        needs.update(other for index in facts.writes for other in read.get(index, ()))
        needs.update(chains[chain] for chain in facts.chains if chain in chains)
        chains.update(dict.fromkeys(facts.chains, number))
        if barrier is not None:
            needs.add(barrier)
        if is_barrier(node):
            needs.update(range(barrier or 0, number))
            barrier = number
        for index in facts.reads:
            read.setdefault(index, []).append(number)
        for index in (*facts.writes, *facts.makes):
            written[index] = number
            read[index] = []
        before.append(needs)
    return before


def _lasting(program: Program) -> set[int]:
    """Storages that are alive at the end: inputs, which the caller holds, and outputs."""
    shown = (facts_of(node).storage for node in program.output.all_input_nodes)
    return (set(program.inputs) | {index for index in shown if index is not None}) - {-1}
