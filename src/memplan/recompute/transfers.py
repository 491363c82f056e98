"""Evaluates plans that offload values to the host: when copies run and when the card waits for
them.

The card runs one op at a time, and the link one copy at a time in each direction, as
`types.plan.OffloadPart` says. A copy to the host begins when autograd saves the value; a copy back
begins when backward needs an earlier value. If the card has to wait for a copy, all later ops are
delayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from memplan.recompute.evaluate import Evaluator, to_arrays
from memplan.recompute.replays import replays
from memplan.recompute.selection import Selection
from memplan.types.step_graph import StepGraph
from memplan.types.trace import I64


@dataclass(frozen=True)
class OffloadPlan:
    """What is recomputed and what is offloaded, by value numbers of a `StepGraph`. The windows are
    those of `OffloadPart`."""

    selection: Selection
    offloaded: frozenset[int] = frozenset()
    out_bytes: int = 0
    ahead_bytes: int = 0


@dataclass(frozen=True)
class Judged:
    """The evaluation of a plan."""

    plan: OffloadPlan
    peak_bytes: int
    """Peak of the whole step, in requested bytes."""
    replay_seconds: float
    """Time of recomputation in a step."""
    stall_seconds: float
    """Time in a step in which the card waits for copies."""
    host_bytes: int
    """Bytes of the offloaded values, which are all in host memory when forward ends."""
    away: tuple[tuple[int, int, int], ...] = ()
    """For each offloaded value: the value, the first row without it, the row that fetches it."""

    @property
    def added_seconds(self) -> float:
        return self.replay_seconds + self.stall_seconds


@dataclass(frozen=True)
class _Ask:
    """When backward or a replay first needs a value, in seconds without any waiting."""

    row: int
    order: int
    seconds: float


class Saves:
    """The values of a graph that can be offloaded, and when autograd saves each."""

    def __init__(self, graph: StepGraph, bytes_per_second: float) -> None:
        """Raises ValueError for a bandwidth that is not positive."""
        if not bytes_per_second > 0:
            raise ValueError(f"a link of {bytes_per_second} bytes per second")
        self.graph = graph
        self.evaluator = Evaluator(graph)
        self.bytes: list[int] = graph.values.bytes.tolist()
        self.copy_seconds: list[float] = (graph.values.bytes / bytes_per_second).tolist()
        self.last_forward: list[int] = graph.touches.last_forward.tolist()
        self.first_use = graph.touches.first_backward
        can = graph.values.droppable.copy()
        can[list(graph.between)] = True
        can &= (self.first_use < len(graph)) & (graph.values.bytes > 0)
        self.values: list[int] = np.flatnonzero(can).tolist()
        self.row = _save_rows(graph, self.values)
        self.ends: list[float] = np.cumsum(graph.ops.seconds).tolist()
        self.values.sort(key=lambda value: (self.row[value], value))
        self.place = {value: place for place, value in enumerate(self.values)}


class Schedule:
    """Evaluates sets of offloaded values for a step with one selection."""

    def __init__(self, saves: Saves, selection: Selection) -> None:
        """Raises ValueError for a selection that is not valid."""
        self.saves = saves
        self.selection = selection
        graph = saves.graph
        profile = saves.evaluator.profile(*to_arrays(graph, selection))
        self.row_bytes: I64 = profile.row_bytes
        self.replay_seconds = profile.seconds
        self.kept = [value for value in saves.values if value not in selection.dropped]

    @cached_property
    def asks(self) -> dict[int, _Ask]:
        """When each kept value is first needed."""
        graph, ends = self.saves.graph, self.saves.ends
        seconds = graph.ops.seconds
        found: dict[int, _Ask] = {}
        replayed: list[tuple[int, float]] = []
        kept, spent = set(self.kept), 0.0
        every = replays(graph, self.selection) if self.selection.groups else []
        for order, replay in enumerate(every):
            begins = float(ends[replay.before] - seconds[replay.before]) + spent
            for row in replay.rows:
                for value in (*graph.ops.reads_of(row), *graph.ops.writes_of(row)):
                    again = value in replay.makes or graph.values.alloc[value] == row
                    if value in kept and not again:
                        found.setdefault(value, _Ask(replay.before, order, begins))
                spent += float(seconds[row])
            replayed.append((replay.before, spent))
        rows = np.array([row for row, _ in replayed], np.int64)
        sums = np.array([0.0, *(done for _, done in replayed)])
        first = self.saves.first_use[self.kept]
        before = sums[np.searchsorted(rows, first, side="right")]
        for value, row, late in zip(self.kept, first.tolist(), before.tolist(), strict=True):
            ask = found.get(value)
            if ask is None or row < ask.row:
                begins = float(ends[row] - seconds[row]) + late
                found[value] = _Ask(row, len(every), begins)
        return found

    @cached_property
    def _order(self) -> dict[int, tuple[int, int, int]]:
        return {value: (ask.row, ask.order, value) for value, ask in self.asks.items()}

    def order(self, offloaded: Iterable[int]) -> list[int]:
        """Offloaded values in the order in which backward needs them."""
        return sorted(offloaded, key=self._order.__getitem__)

    def judge(self, offloaded: frozenset[int], out_bytes: int, ahead_bytes: int) -> Judged:
        """Evaluate offloaded values. Raises KeyError for some that cannot be, or are dropped."""
        saves, graph = self.saves, self.saves.graph
        out = _Out(self, offloaded, out_bytes)
        fetched, delay = _fetch(self, self.order(offloaded), out, ahead_bytes)
        change = np.zeros(len(graph) + 1, np.int64)
        away = []
        for value, gone in out.gone.items():
            gone = max(gone, saves.last_forward[value]) + 1
            back = fetched[value]
            if gone < back:
                away.append((value, gone, back))
                change[gone] -= saves.bytes[value]
                change[back] += saves.bytes[value]
        rows = self.row_bytes + np.cumsum(change)[:-1]
        return Judged(
            OffloadPlan(self.selection, offloaded, out_bytes, ahead_bytes),
            max(graph.rest_peak_bytes, int(rows.max(initial=graph.base_bytes))),
            self.replay_seconds * graph.passes,
            delay * graph.passes,
            sum(saves.bytes[value] for value in offloaded),
            tuple(away),
        )


class _Out:
    """Copies to the host during forward, and when their values are freed."""

    def __init__(self, schedule: Schedule, offloaded: Iterable[int], window: int) -> None:
        saves = schedule.saves
        size, row, ends, copy = saves.bytes, saves.row, saves.ends, saves.copy_seconds
        self.delay = 0.0
        """Seconds by which forward ends later."""
        self.done: dict[int, float] = {}
        """When the copy of each value ends, in seconds."""
        self.gone: dict[int, int] = {}
        """The row at whose end each value's block is freed, if it is."""
        link, held = 0.0, 0
        waiting: deque[int] = deque()
        for value in sorted(offloaded, key=saves.place.__getitem__):
            now = ends[row[value]] + self.delay
            link = max(link, now) + copy[value]
            self.done[value] = link
            waiting.append(value)
            held += size[value]
            while held - size[waiting[0]] > window:
                oldest = waiting.popleft()
                held -= size[oldest]
                self.gone[oldest] = row[value]
                wait = max(0.0, self.done[oldest] - now)
                now += wait
                self.delay += wait


def _fetch(
    schedule: Schedule, order: list[int], out: _Out, window: int
) -> tuple[dict[int, int], float]:
    """Copies back during backward: the row at which each begins, and the step's delay."""
    saves, asks = schedule.saves, schedule.asks
    size, copy = saves.bytes, saves.copy_seconds
    row: dict[int, int] = {}
    done: dict[int, float] = {}
    delay, link, ahead, following = out.delay, 0.0, 0, 0
    order_away = [value for value in order if value in out.gone]
    place = 0
    for value in order:
        ask = asks[value]
        now = ask.seconds + delay
        if place < len(order_away) and order_away[place] == value:
            place += 1
            if value in row:
                ahead -= size[value]
            else:
                following = place
                row[value] = ask.row
                link = done[value] = max(link, now, out.done[value]) + copy[value]
        while following < len(order_away) and ahead + size[order_away[following]] <= window:
            other = order_away[following]
            following += 1
            ahead += size[other]
            row[other] = ask.row
            link = done[other] = max(link, now, out.done[other]) + copy[other]
        if value in done:
            delay += max(0.0, done[value] - now)
    return row, delay


def without_offloaded(graph: StepGraph, judged: Judged) -> StepGraph:
    """The graph without the bytes of offloaded values while they are on the host, for
    `recompute.solve`.

    An offloaded value stays in the graph, but is not droppable and has no bytes. Two new values
    behind the graph's own have its bytes: one until it is freed, one from its fetch on. If a replay
    reads the value before backward does, it has to be fetched earlier; this graph does not show
    that, only an evaluation of the whole plan.
    """
    values = graph.values
    gone = np.array([value for value, _, _ in judged.away], np.int64)
    released = np.array([row for _, row, _ in judged.away], np.int64)
    fetched = np.array([row for _, _, row in judged.away], np.int64)
    nbytes, droppable = values.bytes.copy(), values.droppable.copy()
    nbytes[gone] = 0
    droppable[list(judged.plan.offloaded)] = False
    more = 2 * len(gone)
    size = values.bytes[gone]
    return replace(
        graph,
        values=replace(
            values,
            bytes=np.concatenate((nbytes, size, size)),
            alloc=np.concatenate((values.alloc, values.alloc[gone], fetched)),
            free=np.concatenate((values.free, released, np.maximum(values.free[gone], fetched))),
            droppable=np.concatenate((droppable, np.zeros(more, np.bool_))),
            name=[*values.name, *[""] * more],
        ),
    )


def _save_rows(graph: StepGraph, values: list[int]) -> dict[int, int]:
    """The row at which autograd saves each value: its first reader after the last writer that takes
    time, which views do not. A trace does not tell which op saves a value; one that saves its own
    output does so a little earlier."""
    wanted = set(values)
    row_of = {value: int(graph.values.alloc[value]) for value in values}
    found: dict[int, int] = {}
    for row in range(graph.forward_ops):
        for value in graph.ops.writes_of(row):
            if value in wanted:
                row_of[value] = row
                found.pop(value, None)
        if graph.ops.seconds[row] > 0:
            for value in graph.ops.reads_of(row):
                if value in wanted and row_of[value] < row:
                    found.setdefault(value, row)
    return row_of | found
