"""Cuts a `StepGraph` into a chain of blocks, each a small graph, at rows that few bytes cross.

A block owns the values that its forward rows make. Every option of a block keeps the values that
cross its end, so that blocks can be judged one by one. Beside its own values, a block's graph has a
background: the bytes that no option of any block changes. What earlier blocks keep is added when
options are combined.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memplan.phases.step_graph import alive_rows
from memplan.types.graph import csr
from memplan.types.step_graph import Bools, GraphOps, GraphValues, StepGraph
from memplan.types.trace import I64

MOST_BLOCKS = 96
TAIL_VALUES = 5
"""The last block makes at least so many large values, because logits and losses are the largest."""
GLOBAL_SHARE = 0.4
"""A value that lives across more than this share of forward may cross a cut: a mask, say."""
SMALL_SHARE = 0.05
"""A small value may cross a cut, too: one below this share of the median. Half of the droppable
bytes are in values up to the median."""


@dataclass(frozen=True)
class Block:
    """Forward rows `[start, stop)` and the backward rows that touch what they make."""

    start: int
    stop: int
    window: tuple[int, int]
    """Backward rows `[first, last)` that touch its values."""
    drops: tuple[int, ...]
    """Values that an option may drop, in the order in which they are made."""
    outputs: tuple[int, ...]
    """Values made here and read after `stop`."""
    graph: StepGraph
    """The block's graph. Its rows: forward, one row for all between forward and backward, one row
    for the gradients that come in, and the window."""
    background: I64
    local: dict[int, int]
    """From value numbers of the step's graph to those of the block's."""
    signature: bytes
    """The same for blocks with equal graphs."""

    @property
    def between(self) -> int:
        """The block's row for all rows of the step between its forward and its backward."""
        return self.stop - self.start


@dataclass(frozen=True)
class _Facts:
    last_forward: I64
    """Last forward row that touches each value; -1 for none."""
    crossing: Bools
    """Values that no cut should cross."""
    small: float
    """Values of up to so many bytes do not count."""
    plain: I64
    """Bytes alive at each row without recomputation, droppable values left out."""


def blocks_of(graph: StepGraph, least_values: int) -> list[Block]:
    """The blocks in forward order; together they have all forward rows. Each makes at least
    `least_values` large values that are saved. With fewer blocks, dependencies between values are
    seen inside of blocks; with more blocks, the chain has more choices."""
    facts = _facts(graph)
    cuts = _cut_rows(graph, facts, least_values)
    return [_block(graph, facts, a, b) for a, b in pairwise(cuts)]


def alive_bytes(graph: StepGraph, which: Bools) -> I64:
    """Bytes of the values `which` that are alive at each row without recomputation."""
    values = graph.values
    return alive_rows(len(graph), values.alloc[which], values.free[which], values.bytes[which])


def _facts(graph: StepGraph) -> _Facts:
    values, forward = graph.values, graph.forward_ops
    last = graph.touches.last_forward
    made = (values.alloc >= 0) & (values.alloc < forward)
    sizes = np.sort(values.bytes[values.droppable])
    half = np.searchsorted(np.cumsum(sizes), sizes.sum() / 2)
    small = SMALL_SHARE * float(sizes[half]) if len(sizes) else 0.0
    crossing = made & (last - values.alloc < GLOBAL_SHARE * forward) & (values.bytes > small)
    return _Facts(last, crossing, small, alive_bytes(graph, ~values.droppable))


def _cut_rows(graph: StepGraph, facts: _Facts, least_values: int) -> list[int]:
    """The rows before which to cut, with 0 first and the number of forward rows last."""
    forward = graph.forward_ops
    change = np.zeros((2, forward + 2), dtype=np.int64)
    for value in np.flatnonzero(facts.crossing & (facts.last_forward > graph.values.alloc)):
        begin, end = graph.values.alloc[value] + 1, facts.last_forward[value] + 1
        change[0, begin] += 1
        change[0, end] -= 1
        change[1, begin] += graph.values.bytes[value]
        change[1, end] -= graph.values.bytes[value]
    count, size = np.cumsum(change, axis=1)
    made = np.zeros(forward, dtype=np.int64)
    large = graph.values.droppable & (graph.values.bytes > facts.small)
    np.add.at(made, graph.values.alloc[large], 1)
    single = [row for row in range(1, forward) if count[row] == 1]
    cuts = _spread([*_with_work_between(single, np.cumsum(made), least_values), forward])
    return _halve_long(cuts, size, max(16, forward // 12))


def _with_work_between(rows: list[int], made: I64, least: int) -> list[int]:
    """Rows, from 0 on, such that at least `least` large saved values are made from each to the
    next, and at least TAIL_VALUES after the last."""
    result = [0]
    before = 0
    for row in rows:
        if made[row - 1] >= before + least and made[-1] >= made[row - 1] + TAIL_VALUES:
            result.append(row)
            before = int(made[row - 1])
    return result


def _spread(cuts: list[int]) -> list[int]:
    """Join neighbours to at most MOST_BLOCKS blocks, in equal numbers: equal ones stay so."""
    every = -(-(len(cuts) - 1) // MOST_BLOCKS)
    return [*cuts[:-1:every], cuts[-1]]


def _halve_long(cuts: list[int], size: I64, longest: int) -> list[int]:
    """Cut a long block without a good row at the row that the fewest bytes cross."""
    result = [cuts[0]]
    for end in cuts[1:]:
        pending = [(result[-1], end)]
        while pending:
            begin, stop = pending.pop()
            if stop - begin <= 2 * longest:
                result.append(stop)
                continue
            middle = range(begin + (stop - begin) // 4, stop - (stop - begin) // 4)
            cut = min(middle, key=lambda row: int(size[row]))
            pending += [(cut, stop), (begin, cut)]
    return result


def _block(graph: StepGraph, facts: _Facts, start: int, stop: int) -> Block:
    values, ops = graph.values, graph.ops
    own = np.flatnonzero((values.alloc >= start) & (values.alloc < stop))
    outputs = own[facts.last_forward[own] >= stop]
    drops = np.setdiff1d(own[values.droppable[own]], outputs)
    window = _window(graph, drops if len(drops) else outputs)
    rows = [*range(start, stop), *range(*window)]
    touched = {int(v) for row in rows for v in (*ops.reads_of(row), *ops.writes_of(row))}
    inside = (values.alloc >= window[0]) & (values.alloc < window[1])
    numbers = sorted({*touched, *own.tolist(), *np.flatnonzero(inside).tolist()})
    local = {value: place for place, value in enumerate(numbers)}
    chosen = np.array(numbers, dtype=np.int64)
    cut = _Cut(graph, start, stop, window, chosen, local, set(drops.tolist()))
    piece = cut.graph()
    counted = np.zeros(len(values), dtype=np.bool_)
    counted[chosen[(piece.values.bytes > 0) & ~values.droppable[chosen]]] = True
    beside = facts.plain - alive_bytes(graph, counted)
    background = np.concatenate([beside[start:stop], [0, 0], beside[window[0] : window[1]]])
    return Block(
        start,
        stop,
        window,
        tuple(drops.tolist()),
        tuple(outputs.tolist()),
        piece,
        np.ascontiguousarray(background, dtype=np.int64),
        local,
        cut.signature(piece),
    )


def _window(graph: StepGraph, drops: I64) -> tuple[int, int]:
    """The backward rows from the first to the last that touches one of the values."""
    ops, forward = graph.ops, graph.forward_ops
    first = int(ops.reads_start[forward])
    rows = np.repeat(np.arange(len(graph)), np.diff(ops.reads_start))[first:]
    hits = rows[np.isin(ops.reads[first:], drops)]
    return (int(hits.min()), int(hits.max()) + 1) if len(hits) else (len(graph), len(graph))


@dataclass(frozen=True)
class _Cut:
    """Makes the graph of a block from that of the step."""

    whole: StepGraph
    start: int
    stop: int
    window: tuple[int, int]
    chosen: I64
    local: dict[int, int]
    drops: set[int]

    def _row(self, row: int, end: bool) -> int:
        """The block's row for a row of the step; outside the block the nearest inside."""
        between = self.stop - self.start
        if row < self.start:
            return 0 if end else -1
        if row < self.stop:
            return row - self.start
        if row < self.window[0] or (end and row == self.window[0] < len(self.whole)):
            inside = row >= self.whole.forward_ops
            return between + 2 if end and inside else between + (1 if inside else 0)
        return min(row, self.window[1]) - self.window[0] + between + 2

    def graph(self) -> StepGraph:
        ops = self.whole.ops
        rows = [*range(self.start, self.stop), -1, -1, *range(*self.window)]
        none: list[int] = []
        reads_start, reads = csr(
            [[self.local[v] for v in ops.reads_of(r)] if r >= 0 else none for r in rows]
        )
        writes_start, writes = csr(
            [[self.local[v] for v in ops.writes_of(r)] if r >= 0 else none for r in rows]
        )
        real = np.array(rows, dtype=np.int64)
        forward = self.stop - self.start
        block = GraphOps(
            name=[ops.name[r] if r >= 0 else "" for r in rows],
            call=np.where(real >= 0, ops.call[real], -1),
            nth=np.where(real >= 0, ops.nth[real], -1),
            module=[""] * len(rows),
            seconds=np.where(real >= 0, ops.seconds[real], 0.0),
            flops=np.zeros(len(rows), dtype=np.int64),
            replayable=np.where(real >= 0, ops.replayable[real], False),
            reads_start=reads_start,
            reads=reads,
            writes_start=writes_start,
            writes=writes,
        )
        return StepGraph(block, self._values(len(rows)), forward, 0, 0)

    def _values(self, rows: int) -> GraphValues:
        values, forward = self.whole.values, self.whole.forward_ops
        alloc, free, size = [], [], []
        for value in self.chosen.tolist():
            begin, end = int(values.alloc[value]), int(values.free[value])
            saved = end > forward
            foreign = begin < self.start or (self.stop <= begin < forward)
            fixed = saved and begin < forward and not values.droppable[value]
            counted = not fixed and begin >= 0 and not (foreign and saved and begin < forward)
            alloc.append(-1 if foreign else self._row(begin, False))
            free.append(max(self._row(min(end, len(self.whole)), True), alloc[-1], 0))
            size.append(int(values.bytes[value]) if counted else 0)
        return GraphValues(
            bytes=np.array(size, dtype=np.int64),
            alloc=np.array(alloc, dtype=np.int64),
            free=np.minimum(np.array(free, dtype=np.int64), rows),
            droppable=np.array([v in self.drops for v in self.chosen.tolist()], dtype=np.bool_),
            name=[""] * len(self.chosen),
        )

    def signature(self, piece: StepGraph) -> bytes:
        ops, values = piece.ops, piece.values
        columns = [
            ops.reads_start, ops.reads, ops.writes_start, ops.writes, ops.seconds, ops.replayable,
            values.bytes, values.alloc, values.free, values.droppable,
        ]  # fmt: skip
        return b"|".join([*(c.tobytes() for c in columns), "|".join(ops.name).encode()])
