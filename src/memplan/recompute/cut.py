"""Cuts a step at its articulation points into a chain, and turns checkpoints into a selection.

See docs/recompute.md, "From a graph to a chain".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memplan.phases.step_graph import alive_rows
from memplan.recompute.articulation import (
    Articulation,
    ForwardUses,
    articulations,
    forward_uses,
)
from memplan.recompute.chain import Chain, least_peak
from memplan.recompute.evaluate import Evaluator
from memplan.recompute.selection import Selection
from memplan.types.step_graph import Bools, StepGraph
from memplan.types.trace import I64

SHORTEST_REACH = 8
"""Values in use over fewer rows are never set aside."""
MOST_LAYERS = 20_000
"""The most layers for which checkpoints are searched for; the time is quadratic in them."""


@dataclass(frozen=True)
class Cut:
    """A step as a chain of layers.

    Layer k = 1..n of `chain` runs the forward rows `rows[k - 1]` (first, last). `members[k - 1]`
    are the values that are dropped with it, except its output. `boundaries[k]` is the value y_k; -1
    for the input (k = 0) and for the output of the last layer (k = n). `aside` are the other values
    that pass from layer to layer: they are kept, or held if backward does not read them. The
    chain's bytes do not include the graph's `base_bytes`.
    """

    chain: Chain
    rows: list[tuple[int, int]]
    boundaries: list[int]
    members: list[frozenset[int]]
    aside: frozenset[int]


def _chain(graph: StepGraph, parts: _Parts) -> Cut:
    """A value set aside that is freed in forward without recomputation counts as held until the
    backward of the layer that made it, whether or not a replay needs it."""
    triggers = _triggers(graph, parts)
    sizes = _Sizes(graph, parts, triggers)
    values = graph.values
    alive = alive_rows(len(graph), values.alloc, sizes.free, values.bytes)
    dropping = alive_rows(len(graph), values.alloc, sizes.free_when_dropped(parts), values.bytes)
    dying = alive - _let_go_early(graph, parts, triggers)
    columns = np.zeros((8, parts.count), np.int64)
    for k in range(1, parts.count + 1):
        first, last = parts.rows[k - 1]
        row = min(triggers[k], len(graph) - 1)
        begins = graph.values.alloc == row
        backward = slice(triggers[k], triggers[k - 1])
        columns[:, k - 1] = (
            int(sizes.beside_input(k, dropping, parts).max()),
            int(alive[first : last + 1].max()) - sizes.before(k),
            *_replay_memory(
                graph, parts.rows[k - 1], parts.members[k - 1], parts.boundaries[k], sizes.there
            ),
            alive[row] - graph.values.bytes[begins].sum() - sizes.kept[k - 1] - sizes.saved[k - 1],
            alive[row] - sizes.kept[k - 1],
            int(dying[backward].max(initial=0)) - sizes.kept[k - 1],
            int(alive[backward].max(initial=0)) - sizes.kept[k - 1],
        )
    chain = Chain(sizes.output, sizes.output_saved, sizes.saved, *columns)
    return Cut(chain, parts.rows, parts.boundaries, parts.members, frozenset(parts.aside))


def selection_for(graph: StepGraph, cut: Cut, checkpoints: Iterable[int]) -> Selection:
    """The selection that keeps the boundaries `checkpoints` (of 1..n-1). Every droppable value
    between them is dropped, except in the last segment; each segment is a group."""
    starts = [0, *sorted(set(checkpoints) - {0})]
    groups: list[frozenset[int]] = []
    held: set[int] = set()
    for start, end in pairwise(starts):
        inner = (cut.boundaries[k] for k in range(start + 1, end))
        group = {value for value in inner if graph.values.droppable[value]}
        group = group.union(*cut.members[start:end])
        if not group:
            continue
        groups.append(frozenset(group))
        if start and not cut.chain.output_saved[start]:
            held.add(cut.boundaries[start])
    if groups:
        held.update(v for v in cut.aside if graph.values.free[v] <= graph.forward_ops)
    return Selection(tuple(groups), frozenset(held))


def least_peak_chain(graph: StepGraph) -> Selection:
    """The checkpoints at articulation points with the lowest peak, as a selection. It has no groups
    where no checkpoints lower the peak.

    Several cuts are tried: with no values set aside, then with those in use over more than 1/2,
    1/4, … of forward. The one with the lowest evaluated peak is taken; of equals, the quickest.
    """
    evaluator = Evaluator(graph)
    best = Selection()
    found = evaluator.evaluate(best)
    uses = forward_uses(graph)
    layers = 0
    for longest in _reaches(graph.forward_ops):
        parts = _cut(graph, uses, longest)
        if parts.count == layers or parts.count > MOST_LAYERS:
            continue
        layers = parts.count
        cut = _chain(graph, parts)
        tried = selection_for(graph, cut, least_peak(cut.chain).checkpoints)
        judged = evaluator.evaluate(tried)
        if (judged.peak_bytes, judged.added_seconds) < (found.peak_bytes, found.added_seconds):
            best, found = tried, judged
    return best


def _reaches(rows: int) -> list[int]:
    halves = [rows >> shift for shift in range(1, rows.bit_length())]
    return [rows, *(reach for reach in halves if reach >= SHORTEST_REACH)]


@dataclass(frozen=True)
class _Parts:
    rows: list[tuple[int, int]]
    boundaries: list[int]
    members: list[frozenset[int]]
    aside: dict[int, int]
    """Values used beyond the layer that makes them, without boundaries, with that layer."""

    @property
    def count(self) -> int:
        return len(self.rows)


def _cut(graph: StepGraph, uses: ForwardUses, longest: int) -> _Parts:
    """Cut a step at its articulation points, in time linear in the graph's edges. Values in use
    over more than `longest` rows are set aside."""
    values, forward = graph.values, graph.forward_ops
    if not forward:
        return _Parts([], [-1], [], {})
    points = [p for p in articulations(graph, uses, longest) if _can_be_kept(graph, p)]
    begins = np.array([0, *(point.row for point in points), forward])
    rows = [(int(first), int(stop) - 1) for first, stop in pairwise(begins)]
    boundaries = [-1, *(point.value for point in points), -1]
    layer = np.searchsorted(begins, values.alloc, side="right") - 1
    inner = values.alloc >= 0
    inner[boundaries[1:-1]] = False
    aside = {v: int(layer[v]) + 1 for v in _used_beyond(uses, layer, begins, inner)}
    members: list[set[int]] = [set() for _ in rows]
    for value in np.flatnonzero(inner & values.droppable).tolist():
        if value not in aside:
            members[int(layer[value])].add(value)
    return _Parts(rows, boundaries, [frozenset(m) for m in members], aside)


def _used_beyond(uses: ForwardUses, layer: I64, begins: I64, inner: Bools) -> list[int]:
    """Values that a later layer uses. The last layer does not count: it is never replayed."""
    last = np.searchsorted(begins, uses.last, side="right") - 1
    found: list[int] = np.flatnonzero(inner & (uses.first >= 0) & (last > layer)).tolist()
    return found


def _can_be_kept(graph: StepGraph, point: Articulation) -> bool:
    """Whether a plan can name an articulation point, or need not: backward keeps it alive."""
    row = int(graph.values.alloc[point.value])
    return bool(
        graph.values.free[point.value] > graph.forward_ops
        or (row >= 0 and graph.ops.call[row] >= 0)
    )


class _Sizes:
    """Bytes that the layers of a cut hold, in the columns of `Chain`."""

    def __init__(self, graph: StepGraph, cut: _Parts, triggers: list[int]) -> None:
        self.graph = graph
        self.free: I64 = graph.values.free.copy()
        for value, layer in cut.aside.items():
            if self.free[value] <= graph.forward_ops:
                self.free[value] = min(triggers[layer] + 1, len(graph))
        self.last_forward = graph.touches.last_forward
        values = graph.values
        inner = cut.boundaries[1:-1]
        in_backward = values.free > graph.forward_ops
        self.output_saved: Bools = np.ones(cut.count + 1, np.bool_)
        self.output: I64 = np.zeros(cut.count + 1, np.int64)
        if inner:
            self.output_saved[1:-1] = in_backward[inner]
            counted = values.droppable[inner] | ~in_backward[inner]
            self.output[1:-1] = np.where(counted, values.bytes[inner], 0)
        self.saved: I64 = np.array(
            [sum(int(values.bytes[v]) for v in members) for members in cut.members], np.int64
        )
        steps = self.saved + np.where(self.output_saved, self.output, 0)[1:]
        self.kept: I64 = np.concatenate((np.zeros(1, np.int64), np.cumsum(steps)))
        self.there: Bools = (values.alloc < 0) | (in_backward & ~values.droppable)
        self.there[[*inner, *cut.aside]] = True

    def before(self, k: int) -> int:
        """What forward holds of the layers before k without recomputation."""
        return int(self.kept[k - 1]) + (0 if self.output_saved[k - 1] else int(self.output[k - 1]))

    def free_when_dropped(self, cut: _Parts) -> I64:
        """The first forward row at which each value is freed if everything droppable is dropped."""
        free = self.free.copy()
        dropped = [*frozenset().union(*cut.members), *(v for v in cut.boundaries if v >= 0)]
        dropped = [value for value in dropped if self.graph.values.droppable[value]]
        free[dropped] = self.last_forward[dropped] + 1
        return free

    def beside_input(self, k: int, alive: I64, cut: _Parts) -> npt.NDArray[np.int64]:
        """`alive` during the rows of layer k, less the bytes of y_{k-1} while that is alive."""
        first, last = cut.rows[k - 1]
        rows = np.arange(first, last + 1)
        value = cut.boundaries[k - 1]
        if value < 0:
            return alive[rows]
        droppable = self.graph.values.droppable[value]
        free = self.last_forward[value] + 1 if droppable else self.free[value]
        return alive[rows] - np.where(rows < free, self.output[k - 1], 0)


def _let_go_early(graph: StepGraph, cut: _Parts, triggers: list[int]) -> I64:
    """For each row, bytes of members that are still held after their last use, while their layer's
    backward runs, if nothing is recomputed. A replay's copy is freed by then."""
    last = np.maximum(graph.touches.last_forward, graph.touches.last_backward)
    change = np.zeros(len(graph) + 1, np.int64)
    for k, members in enumerate(cut.members, 1):
        for value in members:
            gone = int(last[value]) + 1
            stop = min(int(graph.values.free[value]), triggers[k - 1])
            if gone < stop:
                change[gone] += graph.values.bytes[value]
                change[stop] -= graph.values.bytes[value]
    return np.asarray(np.cumsum(change)[:-1], np.int64)


def _triggers(graph: StepGraph, cut: _Parts) -> list[int]:
    """For k = 0..n, the first backward row that uses a value which the layers up to k drop, other
    than y_k: there their backward begins. That of the last layer begins with backward."""
    start, edges = graph.ops.reads_start, graph.ops.reads
    first_use = np.full(len(graph.values), len(graph), np.int64)
    rows = np.repeat(np.arange(len(graph)), np.diff(start))
    behind = rows >= graph.forward_ops
    np.minimum.at(first_use, edges[behind], rows[behind])
    result = [len(graph)]
    for k in range(1, cut.count + 1):
        used = [*cut.members[k - 1]]
        if k > 1 and graph.values.droppable[cut.boundaries[k - 1]]:
            used.append(cut.boundaries[k - 1])
        result.append(min([result[-1], *(int(first_use[value]) for value in used)]))
    if cut.count:
        result[-1] = min(result[-1], graph.forward_ops)
    return result


def _replay_memory(
    graph: StepGraph, rows: tuple[int, int], members: frozenset[int], output: int, there: Bools
) -> tuple[int, int]:
    """The peak bytes of replaying the forward rows `rows` (first, last): for the members and
    `output`, and for the members only, with `output` (-1 for none) in memory.

    As in `evaluate`, only needed ops run, an op makes all of its outputs, members stay, and other
    values are freed after their last use. `there`: whether each value is in memory already.
    """
    wanted = members | {output} if output >= 0 else members
    known = there.copy()
    known[list(wanted)] = False
    whole = _replay_peak(graph, rows, wanted, known)
    if output >= 0:
        known[output] = True
    return whole, _replay_peak(graph, rows, members, known)


def _replay_peak(
    graph: StepGraph, rows: tuple[int, int], targets: frozenset[int], there: Bools
) -> int:
    replayed = _needed(graph, rows, targets, there)
    last_use: dict[int, int] = {}
    for row in replayed:
        for value in [*graph.ops.reads_of(row), *graph.ops.writes_of(row)]:
            last_use[value] = row
    nbytes = graph.values.bytes
    held = peak = 0
    copies: set[int] = set()
    for row in replayed:
        again = 0
        for value in graph.ops.writes_of(row):
            if graph.values.alloc[value] != row:
                continue
            if there[value]:
                again += int(nbytes[value])
            else:
                copies.add(value)
                held += int(nbytes[value])
        peak = max(peak, held + again)
        for value in [*graph.ops.reads_of(row), *graph.ops.writes_of(row)]:
            if value in copies and value not in targets and last_use[value] == row:
                copies.remove(value)
                held -= int(nbytes[value])
    return peak


def _needed(
    graph: StepGraph, rows: tuple[int, int], targets: frozenset[int], there: Bools
) -> list[int]:
    """The rows that compute the targets from values that are in memory, in program order."""
    wanted = set(targets)
    found: list[int] = []
    for row in range(rows[1], rows[0] - 1, -1):
        writes = graph.ops.writes_of(row)
        if not any(value in wanted for value in writes):
            continue
        found.append(row)
        changed = [value for value in writes if graph.values.alloc[value] != row]
        wanted.update(v for v in [*graph.ops.reads_of(row), *changed] if not there[v])
    return found[::-1]
