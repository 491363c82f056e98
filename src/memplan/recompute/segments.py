"""The chain of blocks: which option each block takes, and which segments are replayed as a whole.

The dynamic programme of rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal
checkpointing for heterogeneous chains, 2019), on blocks with several options each. `cost[s, t][m]`
is the least added time for blocks [s, t) with m memory levels beside what lives at the start of s,
given that forward is about to run them anyhow. Either forward stores block s by one of its options,
or it stores nothing of [s, u) but what crosses u, and replays [s, u) when backward arrives there;
within a replay the same choice recurs.
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
"""Table entries, levels x pairs of blocks, at most about."""


@dataclass(frozen=True)
class Chain:
    """Blocks of a graph with their options."""

    graph: StepGraph
    blocks: list[Block]
    options: list[BlockOptions]


class SegmentTable:
    """The table for one chain; plans for every memory level come out of it.

    Bytes are rounded to the nearest of the levels: errors of blocks that repeat add up, so a
    plan's own level says little and `evaluate` says what it takes.
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
        """[s, u]: what skipping [s, u) keeps until its replay: droppable values made in it that
        forward reads at u or later, and what crosses s unsaved and is held."""
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
        """Added seconds, and the option of the first block, or -1 and where the segment that
        forward skips ends."""
        return self._table.best(start, stop, level)

    def steps(self) -> list[int]:
        """The levels at which the cost falls, from the least memory up."""
        costs = [self.best(0, len(self.chain.blocks), m)[0] for m in range(self.levels + 1)]
        before = [np.inf, *costs]
        return [m for m, cost in enumerate(costs) if cost < before[m]]

    def plan(self, level: int) -> Selection:
        """The plan for a level of finite cost."""
        writer = _PlanWriter(self)
        writer.write(0, len(self.chain.blocks), level, None)
        return writer.selection()


class _PlanWriter:
    def __init__(self, table: SegmentTable) -> None:
        self.table = table
        self.chain = table.chain
        self.last = _last_reads(self.chain.graph)
        self.group: dict[int, int | None] = {}
        """Value → number of the group it is dropped in; None: kept."""
        self.groups = 0
        self.held: set[int] = set()

    def write(self, start: int, stop: int, level: int, into: int | None) -> None:
        """Decide [start, stop) in a run through forward whose stored values go into a group; None:
        the step's own forward, which keeps them."""
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
    """Of each block: what is made before it, read by forward in it or later, and not saved by
    autograd. A replay that begins at the block needs them held. Values that cross much of forward
    count for the first block they enter only."""
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
    """Those of all blocks."""
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
