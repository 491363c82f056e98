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

from memplan.runtime.graph.program import Facts, MemplanOp, Program, facts_of
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
        return _Schedule(self.program.graph_module.graph).of([self.nodes[int(op)] for op in order])


def operator_graph(program: Program) -> OperatorGraph:
    """The graph of a program, with an operator for each node that runs a kernel, in program order.

    Inputs that are alive at the end are part of `Graph.base_bytes`.
    """
    graph = program.graph_module.graph
    nodes = [node for node in graph.nodes if _is_operator(node)]
    row = {node: number for number, node in enumerate(nodes)}
    before = _dependencies(nodes, row)
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
        name=[_name(node) for node in nodes],
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


def _name(node: fx.Node) -> str:
    return str(node.target)


def _dependencies(nodes: list[fx.Node], row: dict[fx.Node, int]) -> list[set[int]]:
    """The operators that must run before each one, without some that others imply."""
    roots = _Roots(row)
    written: dict[int, int] = {}
    read: dict[int, list[int]] = {}
    chains: dict[str, int] = {}
    before: list[set[int]] = []
    barrier = 0
    for number, node in enumerate(nodes):
        facts = facts_of(node)
        needs = set(roots.of_arguments(node))
        for index in facts.reads:
            if index in written:
                needs.add(written[index])
        for index in facts.writes:
            if index in written:
                needs.add(written[index])
            needs.update(read.get(index, ()))
        for chain in facts.chains:
            if chain in chains:
                needs.add(chains[chain])
            chains[chain] = number
        if number and is_barrier(nodes[barrier]):
            needs.add(barrier)
        if is_barrier(node):
            needs.update(range(barrier, number))
            barrier = number
        _note(facts, number, written, read)
        before.append(needs)
    return before


def _note(facts: Facts, number: int, written: dict[int, int], read: dict[int, list[int]]) -> None:
    for index in facts.reads:
        read.setdefault(index, []).append(number)
    for index in (*facts.writes, *facts.makes):
        written[index] = number
        read[index] = []


class _Roots:
    """Finds the operators whose results a node uses, through views and arithmetic of numbers."""

    def __init__(self, row: dict[fx.Node, int]) -> None:
        self._row = row
        self._known: dict[fx.Node, frozenset[int]] = {}

    def of_arguments(self, node: fx.Node) -> frozenset[int]:
        return frozenset[int]().union(*map(self._of, node.all_input_nodes))

    def _of(self, node: fx.Node) -> frozenset[int]:
        if node in self._row:
            return frozenset((self._row[node],))
        if node.op == "placeholder":
            return frozenset()
        if node not in self._known:
            self._known[node] = self.of_arguments(node)
        return self._known[node]


def _lasting(program: Program) -> set[int]:
    """Storages that are alive at the end: inputs, which the caller holds, and outputs."""
    shown = (facts_of(node).storage for node in program.output.all_input_nodes)
    return (set(program.inputs) | {index for index in shown if index is not None}) - {-1}


class _Schedule:
    """Puts all other nodes of a graph between its operators."""

    def __init__(self, graph: fx.Graph) -> None:
        self._all = list(graph.nodes)
        self._placed: dict[fx.Node, None] = {}

    def of(self, nodes: list[fx.Node]) -> list[fx.Node]:
        for node in self._all:
            if node.op == "placeholder":
                self._placed[node] = None
        for node in nodes:
            self._place(node)
        output = self._all[-1]
        self._place(output)
        return [node for node in self._placed if node.op not in ("placeholder", "output")]

    def _place(self, node: fx.Node) -> None:
        """Place a node after the nodes without a kernel that it needs. Elements of its result
        follow at once: while the tuple exists, it keeps all of them alive."""
        waiting = [node]
        while waiting:
            top = waiting[-1]
            missing = [n for n in top.all_input_nodes if n not in self._placed]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            self._placed[top] = None
            if _is_operator(top):
                self._elements(top)

    def _elements(self, node: fx.Node) -> None:
        for user in node.users:
            if user.target is operator.getitem and user not in self._placed:
                self._placed[user] = None
                self._elements(user)
