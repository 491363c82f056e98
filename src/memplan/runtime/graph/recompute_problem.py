"""A captured graph as the problem that `memplan.recompute` solves: which values to recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from memplan.order.evaluate import lifetimes, program_order
from memplan.recompute.replays import replays
from memplan.recompute.selection import Selection
from memplan.runtime.graph.joint import Joint
from memplan.runtime.graph.operator_graph import OperatorGraph, operator_graph
from memplan.runtime.graph.program import (
    BACKWARD,
    Facts,
    facts_of,
    is_element,
    program_of,
    tensors,
)
from memplan.runtime.graph.region import region
from memplan.runtime.graph.rematerialize import NodeReplay, without_statistics
from memplan.runtime.tape.replayable import traits_of
from memplan.types.graph import csr
from memplan.types.step_graph import Bools, GraphOps, GraphValues, StepGraph
from memplan.types.trace import I64


@dataclass(frozen=True, eq=False)
class RecomputeProblem:
    """Forward and backward of a program."""

    operators: OperatorGraph
    graph: StepGraph
    """Its rows are those of `operators`. `seconds` is the cost of running an operator again: its
    FLOPs plus the bytes that it moves, which decide where there are no FLOPs."""
    storages: list[int]
    """The index in `Program.storages` of each value of the graph. Scratch memory of a CUDA kernel
    is a value of its own, with -1."""

    def replays(self, selection: Selection) -> tuple[NodeReplay, ...]:
        """The replays of a selection, by the names of nodes."""
        nodes, roots = self.operators.nodes, self._roots()

        def names(values: frozenset[int]) -> frozenset[str]:
            return frozenset(name for v in values for name in roots.get(self.storages[v], ()))

        return tuple(
            NodeReplay(
                nodes[one.before].name,
                tuple(nodes[row].name for row in one.rows),
                names(one.makes),
                names(one.gives),
            )
            for one in replays(self.graph, selection)
        )

    def _roots(self) -> dict[int, list[str]]:
        """The names of nodes, by each storage that forward allocates: the operator that does so,
        and elements of its result that lie there."""
        roots: dict[int, list[str]] = {}
        for node in self.operators.program.graph_module.graph.nodes:
            if node.op != "call_function" or node.meta.get(BACKWARD):
                continue
            facts = facts_of(node)
            if facts.storage is not None and (facts.makes or is_element(node)):
                roots.setdefault(facts.storage, []).append(node.name)
        return roots


def recompute_problem(operators: OperatorGraph) -> RecomputeProblem:
    """The problem of a program without in-place operators and without saves in `CallerTurn`."""
    facts = [facts_of(node) for node in operators.nodes]
    forward = next((row for row, one in enumerate(facts) if one.backward), len(facts))
    touched = sorted({index for one in facts for index in _touched(one)})
    scratch = operators.graph.scratch * operators.program.on_cuda
    own = np.flatnonzero(scratch)
    taken = {int(row): {len(touched) + number} for number, row in enumerate(own)}
    values = {storage: number for number, storage in enumerate(touched)}
    start, stop = lifetimes(operators.graph, program_order(operators.graph))
    made = {
        storage: value
        for value, storage in enumerate(operators.storages)
        if operators.graph.maker[value] >= 0
    }

    def column(of_values: I64, otherwise: int) -> I64:
        found = (made.get(storage) for storage in touched)
        return np.array([otherwise if v is None else of_values[v] for v in found], np.int64)

    count = len(facts)
    alloc = column(start, -1)
    replayable = _replayable(operators.nodes, forward)
    reads_start, reads = csr([{values[s] for s in f.reads} for f in facts])
    writes_start, writes = csr(
        {values[s] for s in (*one.writes, *one.makes)} | taken.get(row, set())
        for row, one in enumerate(facts)
    )
    droppable = _droppable(operators, facts, touched, alloc, forward, replayable)
    names = [operators.program.storages[storage].name for storage in touched]
    graph = StepGraph(
        ops=GraphOps(
            name=operators.graph.name,
            call=np.where(np.arange(count) < forward, 0, -1).astype(np.int64),
            nth=np.arange(count, dtype=np.int64),
            module=[""] * count,
            seconds=np.array([_cost(operators, one) for one in facts]),
            flops=np.array([one.flops for one in facts], np.int64),
            replayable=replayable,
            reads_start=reads_start,
            reads=reads,
            writes_start=writes_start,
            writes=writes,
        ),
        values=GraphValues(
            bytes=np.append(column(operators.graph.bytes, 0), scratch[own]),
            alloc=np.append(alloc, own),
            free=np.append(column(stop, count), own + 1),
            droppable=np.append(droppable, np.zeros(len(own), np.bool_)),
            name=[*names, *[""] * len(own)],
        ),
        forward_ops=forward,
        base_bytes=operators.graph.base_bytes,
        rest_peak_bytes=0,
    )
    return RecomputeProblem(operators, graph, [*touched, *[-1] * len(own)])


def problem_without_saves(joint: Joint) -> RecomputeProblem:
    """The problem of a joint graph, where the solution decides what forward saves."""
    return recompute_problem(operator_graph(program_of(region(joint, saves=False).module)))


def _touched(facts: Facts) -> set[int]:
    return {*facts.reads, *facts.writes, *facts.makes}


def _replayable(nodes: list[fx.Node], forward: int) -> Bools:
    """Which forward rows give their result again at any time in backward."""
    written: dict[int | None, int] = {}
    for row, node in enumerate(nodes):
        written.update(dict.fromkeys(facts_of(node).writes, row))
    result = np.zeros(len(nodes), np.bool_)
    for row, node in enumerate(nodes[:forward]):
        facts = facts_of(node)
        without = without_statistics(node)
        used = node.all_input_nodes if without is None else _nodes(without[1])
        result[row] = (
            not facts.chains
            and (without is not None or not facts.writes)
            and isinstance(node.target, torch._ops.OpOverload)
            and _repeats(node)
            and all(written.get(facts_of(one).storage, -1) <= row for one in used)
        )
    return result


def _nodes(args: tuple[Any, ...]) -> list[fx.Node]:
    return [one for one in args if isinstance(one, fx.Node)]


def _repeats(node: fx.Node) -> bool:
    """Whether an operator gives the same bits each time it runs."""
    traits = traits_of(node.target)
    made = tensors(node.meta.get("val"))
    races = traits.races_on_cuda and any(one.device.type == "cuda" for one in made)
    return traits.replayable and not traits.uninitialised and not races


def _droppable(
    operators: OperatorGraph,
    facts: list[Facts],
    touched: list[int],
    alloc: I64,
    forward: int,
    replayable: Bools,
) -> Bools:
    """Values that forward can recompute, that backward reads, and that nothing else needs."""
    lasts = zip(operators.storages, operators.graph.lasts, strict=True)
    spoiled = {storage for storage, lasting in lasts if lasting}
    read: set[int] = set()
    for row, one in enumerate(facts):
        if row >= forward:
            read |= {*one.reads}
            spoiled |= {*one.writes}
        elif not replayable[row]:
            spoiled |= {*one.writes, *one.makes}
    return np.array(
        [
            0 <= alloc[number] < forward and storage in read and storage not in spoiled
            for number, storage in enumerate(touched)
        ],
        np.bool_,
    )


def _cost(operators: OperatorGraph, facts: Facts) -> float:
    storages = operators.program.storages
    return float(sum(storages[index].bytes for index in _touched(facts)) + facts.flops)
