"""The forward and backward passes of a captured step, as the graphs that recomputation plans on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from memplan.order.evaluate import held, lifetimes, program_order
from memplan.runtime.graph.dependencies import Operators
from memplan.runtime.graph.program import Facts, facts_of
from memplan.runtime.tape.replayable import traits_of
from memplan.types.step_graph import GraphOps, GraphValues, StepGraph
from memplan.types.trace import I64

FLOPS_PER_BYTE = 50.0
"""What a processor can compute while it moves a byte: only how costs compare matters here."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Rows `[begin, end)` of a program's operators: a forward and its backward."""

    begin: int
    backward: int
    """The first row that autograd runs."""
    end: int
    graph: StepGraph
    storages: list[int]
    """Of each value of the graph: its index in `Program.storages`."""


def passes_of(operators: Operators) -> list[Pass]:
    """The passes of a step, each planned with what is held beside it."""
    spans = _spans([facts_of(node) for node in operators.nodes])
    return [_pass(operators, *span, spans) for span in spans]


def _spans(facts: list[Facts]) -> list[tuple[int, int, int]]:
    """First row of forward, first row of backward, end."""
    spans = []
    begin, backward, end = 0, -1, 0
    for row, one in enumerate(facts):
        if one.backward:
            backward, end = (row if backward < 0 else backward), row + 1
        elif (
            backward >= 0
            and not one.update
            and not any(later.backward for later in facts[row : row + _BETWEEN])
        ):
            spans.append((begin, backward, end))
            begin, backward = row, -1
    if backward >= 0:
        spans.append((begin, backward, end))
    return spans


_BETWEEN = 8
"""Operators of Python code between those of backward do not end it: hooks, a checkpoint's own."""


def _pass(
    operators: Operators,
    begin: int,
    backward: int,
    end: int,
    spans: list[tuple[int, int, int]],
) -> Pass:
    graph = operators.graph
    order = program_order(graph)
    start, stop = lifetimes(graph, order)
    maker = graph.maker
    facts = [facts_of(node) for node in operators.nodes[begin:end]]
    inside = (maker >= begin) & (maker < end)
    touched = sorted({index for one in facts for index in _touched(one)})
    value_of = {storage: value for value, storage in enumerate(operators.storages)}
    values = {storage: number for number, storage in enumerate(touched)}

    def column(what: I64, outside: int) -> I64:
        rows = [value_of.get(storage, -1) for storage in touched]
        return np.array(
            [int(what[row]) if row >= 0 and inside[row] else outside for row in rows], np.int64
        )

    around = _bytes_around(operators, start, stop, inside, begin, end)
    all_rows = held(graph, order)
    rest = np.ones(len(graph), bool)
    for first, _, last in spans:
        rest[first:last] = False
    replayable = _replayable(operators, begin, backward, end)
    reads_start, reads = _csr([sorted({values[s] for s in f.reads}) for f in facts])
    writes_start, writes = _csr([sorted({values[s] for s in (*f.writes, *f.makes)}) for f in facts])
    count = end - begin
    alloc = column(maker - begin, -1)
    step_graph = StepGraph(
        ops=GraphOps(
            name=graph.name[begin:end],
            call=np.where(np.arange(count) < backward - begin, 0, -1).astype(np.int64),
            nth=np.arange(count, dtype=np.int64),
            module=[""] * count,
            source=graph.source[begin:end],
            seconds=np.array([_cost(operators, f) for f in facts]),
            flops=np.array([getattr(f, "flops", 0) for f in facts], np.int64),
            replayable=replayable,
            reads_start=reads_start,
            reads=reads,
            writes_start=writes_start,
            writes=writes,
        ),
        values=GraphValues(
            bytes=column(graph.bytes, 0),
            alloc=alloc,
            free=np.minimum(column(np.asarray(stop), end) - begin, count),
            droppable=_droppable(operators, touched, alloc, begin, backward, end, replayable),
            name=[operators.program.storages[storage].name for storage in touched],
        ),
        forward_ops=backward - begin,
        base_bytes=around,
        rest_peak_bytes=int(all_rows[rest].max(initial=0)),
    )
    return Pass(begin, backward, end, step_graph, touched)


def _touched(facts: Facts) -> set[int]:
    return {*facts.reads, *facts.writes, *facts.makes}


def _bytes_around(
    operators: Operators, start: I64, stop: I64, inside: np.ndarray, begin: int, end: int
) -> int:
    """The most that is held during the pass and not made by it."""
    graph = operators.graph
    change = np.zeros(end - begin + 1, np.int64)
    outside = ~inside & (stop > begin) & (start < end)
    np.add.at(change, np.maximum(start[outside] - begin, 0), graph.bytes[outside])
    np.add.at(change, np.minimum(stop[outside], end) - begin, -graph.bytes[outside])
    return graph.base_bytes + int(np.cumsum(change[:-1]).max(initial=0))


def _replayable(operators: Operators, begin: int, backward: int, end: int) -> np.ndarray:
    """Which forward rows give their result again at any time in this pass's backward."""
    written: dict[int, int] = {}
    for row, node in enumerate(operators.nodes[:end]):
        written.update(dict.fromkeys(facts_of(node).writes, row))
    result = np.zeros(end - begin, bool)
    for row in range(begin, backward):
        node = operators.nodes[row]
        facts = facts_of(node)
        result[row - begin] = (
            not facts.chains
            and not facts.writes
            and isinstance(node.target, torch._ops.OpOverload)
            and traits_of(node.target).replayable
            and not traits_of(node.target).uninitialised
            and all(written.get(storage, -1) <= row for storage in facts.reads)
        )
    return result


def _droppable(
    operators: Operators,
    touched: list[int],
    alloc: I64,
    begin: int,
    backward: int,
    end: int,
    replayable: np.ndarray,
) -> np.ndarray:
    """Values that forward makes again on request, that backward reads and nobody else does."""
    facts = [facts_of(node) for node in operators.nodes]
    lasting = {
        storage
        for storage, lasts in zip(operators.storages, operators.graph.lasts, strict=True)
        if lasts
    }
    read_in_backward: set[int] = set()
    spoiled = set(lasting)
    for row, one in enumerate(facts):
        if row >= end:
            spoiled |= _touched(one)
        elif row >= backward:
            read_in_backward |= {*one.reads}
            spoiled |= {*one.writes}
        elif row >= begin and not replayable[row - begin]:
            spoiled |= {*one.writes, *one.makes}
    return np.array(
        [
            alloc[number] >= 0
            and alloc[number] < backward - begin
            and storage in read_in_backward
            and storage not in spoiled
            for number, storage in enumerate(touched)
        ],
        bool,
    )


def _cost(operators: Operators, facts: Facts) -> float:
    """In the time of a byte's way to memory."""
    storages = operators.program.storages
    moved = sum(storages[index].bytes for index in _touched(facts))
    return max(float(moved), float(getattr(facts, "flops", 0)) / FLOPS_PER_BYTE)


def _csr(rows: list[list[int]]) -> tuple[I64, I64]:
    start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([item for row in rows for item in row], np.int64)
