"""Chooses an option for each block of a chain, and segments of blocks that are replayed as a whole.

This is the dynamic programme of rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal
checkpointing for heterogeneous chains, 2019), for blocks with several options each. `cost[s, t][m]`
is the least added time for the blocks [s, t), with m memory levels beside the values alive at the
start of s, when forward is about to run them. There are two choices. Forward keeps block s by one
of its options. Or it keeps nothing of [s, u) but the values that cross u, and [s, u) is replayed
when backward arrives there; the replay has the same two choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan._native import SegmentTable as NativeTable
from memplan.recompute.blocks import GLOBAL_SHARE, Block
from memplan.recompute.options import BlockOptions
from memplan.recompute.selection import Selection
from memplan.types.step_graph import StepGraph
from memplan.types.trace import I64

WORK = 8_000_000
"""About the most entries of the table: levels times pairs of blocks."""


@dataclass(frozen=True)
class Chain:
    """Blocks of a graph with their options."""

    graph: StepGraph
    blocks: list[Block]
    options: list[BlockOptions]


class SegmentTable:
    """The table for one chain, with a plan for every memory level.

    Bytes are rounded to the nearest level, and the errors of equal blocks add up. So the level of a
    plan is only a rough figure; `evaluate` gives its peak.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        count, options = len(chain.blocks), chain.options
        sizes = [len(o) for o in options]
        self.levels = int(np.clip(2 * WORK // (count * count), 128, 4096))
        self.unit = max(1.0, _plain_peak(options) / self.levels)
        self.between = self._level(np.concatenate([o.between for o in options]))
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)
        self.inputs = unsaved_inputs(chain)
        self.crossing = self._level(self._crossing_bytes())
        self.back = [list(block.local) for block in chain.blocks]
        self._table = NativeTable(
            self.levels,
            self.starts,
            self.between,
            self._level(np.concatenate([np.maximum(o.window, o.forward) for o in options])),
            np.concatenate([o.seconds for o in options]),
            self.crossing.ravel(),
            self._level(np.array([o.forward.min() for o in options])),
            np.array([chain.graph.ops.seconds[b.start : b.stop].sum() for b in chain.blocks]),
        )

    def _level(self, size: I64) -> I64:
        return np.rint(np.maximum(size, 0) / self.unit).astype(np.int64)

    def _crossing_bytes(self) -> I64:
        """At [s, u]: the bytes kept until the replay of [s, u). They are the droppable values made
        in it that forward reads at u or later, and the unsaved values that cross s and are held."""
        blocks, values = self.chain.blocks, self.chain.graph.values
        count = len(blocks)
        ends = np.array([block.stop for block in blocks])
        last = _last_reads(self.chain.graph)
        result = np.zeros((count + 1, count + 1), dtype=np.int64)
        for place, block in enumerate(blocks):
            for value in block.outputs:
                if values.droppable[value]:
                    until = int(np.searchsorted(ends, last[value], side="right"))
                    result[: place + 1, place + 1 : until + 1] += values.bytes[value]
        for place, inputs in enumerate(self.inputs):
            result[place, place + 1 :] += values.bytes[list(inputs)].sum()
        return result

    def best(self, start: int, stop: int, level: int) -> tuple[float, int, int]:
        """The least added seconds, with the option of the first block, or with -1 and the end of
        the segment that is replayed as a whole."""
        return self._table.best(start, stop, level)

    def steps(self) -> list[int]:
        """The levels at which the cost falls, in rising order."""
        costs = [self.best(0, len(self.chain.blocks), m)[0] for m in range(self.levels + 1)]
        before = [np.inf, *costs]
        return [m for m, cost in enumerate(costs) if cost < before[m]]

    def plan(self, level: int) -> Selection:
        """The plan for a level whose cost is finite."""
        writer = _PlanWriter(self)
        writer.write(0, len(self.chain.blocks), level, None)
        return writer.selection()


class _PlanWriter:
    def __init__(self, table: SegmentTable) -> None:
        self.table = table
        self.chain = table.chain
        self.last = _last_reads(self.chain.graph)
        self.group: dict[int, int | None] = {}
        """By value: the number of the group in which it is dropped; None if it is kept."""
        self.groups = 0
        self.held: set[int] = set()

    def write(self, start: int, stop: int, level: int, into: int | None) -> None:
        """Decide for the blocks [start, stop). `into`: the group of the replay that runs them, or
        None for the step's own forward, which keeps values."""
        table = self.table
        while start < stop:
            _, option, middle = table.best(start, stop, level)
            if into is None:
                self.held |= set(table.inputs[start])
            if option < 0:
                self._keep_crossing(start, middle, into)
                self.groups += 1
                self.write(start, middle, level, self.groups - 1)
                level -= int(table.crossing[start, middle])
                start = middle
            else:
                self._take(start, option, into)
                level -= int(table.between[table.starts[start] + option])
                start += 1

    def _keep_crossing(self, start: int, middle: int, into: int | None) -> None:
        values = self.chain.graph.values
        for block in self.chain.blocks[start:middle]:
            for value in block.outputs:
                if values.droppable[value] and self.last[value] >= self.chain.blocks[middle].start:
                    self.group.setdefault(value, into)

    def _take(self, place: int, choice: int, into: int | None) -> None:
        block = self.chain.blocks[place]
        back = self.table.back[place]
        for members in self.chain.options[place].selections[choice].groups:
            for member in members:
                self.group[back[member]] = self.groups
            self.groups += 1
        for value in (*block.drops, *block.outputs):
            if self.chain.graph.values.droppable[value]:
                self.group.setdefault(value, into)

    def selection(self) -> Selection:
        members: dict[int, set[int]] = {}
        for value, number in self.group.items():
            if number is not None:
                members.setdefault(number, set()).add(value)
        return Selection(tuple(map(frozenset, members.values())), frozenset(self.held))


def unsaved_inputs(chain: Chain) -> list[tuple[int, ...]]:
    """For each block, the values made before it that forward reads in it or later and that autograd
    does not save: a replay from this block on needs them held. A value that crosses much of forward
    counts only for the first block that it enters."""
    graph = chain.graph
    last, used = _last_reads(graph), graph.touches.last_backward >= 0
    far = last - graph.values.alloc > GLOBAL_SHARE * graph.forward_ops
    result: list[tuple[int, ...]] = []
    crossing: set[int] = set()
    for block in chain.blocks:
        crossing = {v for v in crossing if last[v] >= block.start}
        result.append(tuple(sorted(crossing)))
        crossing = {v for v in crossing if not far[v]} | {v for v in block.outputs if not used[v]}
    return result


def every_unsaved_input(chain: Chain) -> frozenset[int]:
    """The `unsaved_inputs` of all blocks together."""
    return frozenset(value for inputs in unsaved_inputs(chain) for value in inputs)


def _last_reads(graph: StepGraph) -> I64:
    last = np.full(len(graph.values), -1, dtype=np.int64)
    rows = np.repeat(np.arange(len(graph)), np.diff(graph.ops.reads_start))
    inside = rows < graph.forward_ops
    np.maximum.at(last, graph.ops.reads[inside], rows[inside])
    return last


def _plain_peak(options: list[BlockOptions]) -> int:
    kept, top = 0, 1
    for option in options:
        top = max(top, kept + int(max(option.window[0], option.forward[0])))
        kept += int(option.between[0])
    return max(top, kept)
