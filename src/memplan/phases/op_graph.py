"""The `Graph` of a trace: a whole step as operators whose order is free, for what-if answers.

A trace says which storages an operator reads and writes, not which views of them, nor what else the
script's Python does with their values. So the order of such a graph can be asked for, never run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memplan.phases.op_dependencies import dependencies
from memplan.phases.pass_values import PassValues, pass_values
from memplan.phases.passes import Pass, alive_after, step_range
from memplan.phases.steps import find_steps
from memplan.types.errors import NoAnswerError
from memplan.types.graph import Graph, csr
from memplan.types.trace import I64, EventKind, Role, Trace

RELEASE = "memplan.release"
"""Name of the rows that let go of what the program holds beyond its last use."""


def op_graph(trace: Trace, step: int | None = None) -> Graph:
    """A step of a captured trace; by default the steady one, else the last complete one.

    Views are no operators here. What the program lets go of later than after its last use is let go
    by a row of its own, `RELEASE`: in program order it comes where the program did so, and that
    order holds what the trace's step holds; another order may have it sooner. Gradients that the
    next step will drop without reading them are let go at the end in the same way. Scratch is what
    an operator's most bytes in the trace hold beyond the values alive while it runs.

    Raises NoAnswerError for traces without operators or without a complete step, UsageError for a
    step that is not there.
    """
    start, whole = _whole_step(trace, step)
    values = pass_values(trace, whole)
    table = _Table.of(trace, whole, values)
    alive = alive_after(trace)
    base = int(alive[whole.first_event]) - int(values.bytes[values.alloc < 0].sum())
    held = _held_values(trace, values, table, _drops_gradients(trace, start, whole))
    scratch = _scratch(trace, whole, values, table, held, alive - base)
    graph = _graph(trace, whole, values, table, held, scratch, base)
    graph.check()
    return graph


def _whole_step(trace: Trace, step: int | None) -> tuple[int, Pass]:
    """The first event of a step, and its operators with their events as one pass."""
    table = find_steps(trace)
    if not len(trace.ops):
        raise NoAnswerError(
            f"the trace ({trace.meta.origin}) tells requests of memory only, not the operators "
            "whose order is asked for",
            "capture the job itself: memplan estimate -o job.trace SCRIPT",
        )
    if step is None and not len(table):
        raise NoAnswerError(
            "the trace has no complete step",
            "capture a training job that calls optimizer.step() at least once",
        )
    start, stop, first, last = step_range(trace, table, step)
    if first == last:
        raise NoAnswerError("the step has no operators in the trace")
    event = int(trace.ops.event[first])
    return start, Pass(first, first, last, event, max(stop, event))


def _drops_gradients(trace: Trace, start: int, whole: Pass) -> bool:
    """Whether the step lets go, unread, of all gradients that the one before left; the next one
    will do so with this one's."""
    events, ops = trace.events, trace.ops
    there = np.zeros(len(trace.storages), np.int64)
    kind, storage = events.kind[:start], events.storage[:start]
    np.add.at(there, storage[kind == EventKind.ALLOC], 1)
    np.subtract.at(there, storage[kind == EventKind.FREE], 1)
    before = np.flatnonzero((there > 0) & (trace.storages.role == Role.GRADIENT))
    part = slice(start, whole.last_event)
    gone = events.storage[part][events.kind[part] == EventKind.FREE]
    touched = [
        column[starts[whole.start] : starts[whole.stop]]
        for starts, column in ((ops.reads_start, ops.reads), (ops.writes_start, ops.writes))
    ]
    dropped = np.setdiff1d(gone, np.concatenate(touched))
    return len(before) > 0 and bool(np.isin(before, dropped).all())


@dataclass(frozen=True)
class _Table:
    """The rows of the step that are operators of the graph; a *place* is a position among them."""

    rows: I64
    place: I64
    """For each row of the step, the place of the last operator up to it."""
    reads: list[list[int]]
    """Values that the operator at each place reads."""
    writes: list[list[int]]

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, trace: Trace, whole: Pass, values: PassValues) -> _Table:
        keeps = trace.ops.moved_bytes[whole.start : whole.stop] != 0
        keeps[values.writes.row] = True
        keeps[values.scratch_rows] = True
        keeps[0] = True
        rows = np.flatnonzero(keeps)
        place = np.searchsorted(rows, np.arange(len(keeps)), "right") - 1
        return cls(rows, place, values.reads.by_row(rows), values.writes.by_row(rows))


@dataclass(frozen=True)
class _Held:
    """A value of the graph; operators as places."""

    value: int
    maker: int
    users: frozenset[int]
    lasts: bool
    until: int
    """The place after which the program releases it."""

    @property
    def last_use(self) -> int:
        return max((self.maker, *self.users))


def _held_values(
    trace: Trace, values: PassValues, table: _Table, drops_gradients: bool
) -> list[_Held]:
    """The values of the graph, without those that have no bytes and those that exist before and
    after, which are its base."""
    users: list[set[int]] = [set() for _ in range(len(values))]
    for touched in (table.reads, table.writes):
        for place, row in enumerate(touched):
            for value in row:
                users[value].add(place)
    held = []
    for value, (made, outlives) in enumerate(
        zip(values.alloc.tolist(), values.outlives.tolist(), strict=True)
    ):
        if values.bytes[value] == 0 or (made < 0 and outlives):
            continue
        maker = int(table.place[made]) if made >= 0 else -1
        until = int(table.place[max(int(values.free[value]) - 1, made, 0)])
        goes = drops_gradients and trace.storages.role[values.storage[value]] == Role.GRADIENT
        uses = frozenset(users[value] - {maker})
        held.append(_Held(value, maker, uses, outlives and not goes, until))
    return held


def _scratch(
    trace: Trace, whole: Pass, values: PassValues, table: _Table, held: list[_Held], alive: I64
) -> I64:
    """Scratch bytes by place. `alive`: bytes before each event, without the base."""
    change = np.zeros(len(table) + 1, np.int64)
    for one in held:
        size = int(values.bytes[one.value])
        change[max(one.maker, 0)] += size
        change[len(table) if one.lasts else one.until + 1] -= size
    known = np.cumsum(change)[:-1]
    begins = np.append(trace.ops.event[whole.start + table.rows], whole.last_event)
    made = np.flatnonzero(trace.events.kind[: whole.last_event] == EventKind.ALLOC)
    peaks = np.zeros(len(table), np.int64)
    for place, (begin, end) in enumerate(pairwise(begins.tolist())):
        request = int(np.searchsorted(made, begin))
        if request < len(made) and made[request] < end:
            begin = int(made[request])  # what was let go before it went with the operator before
        peaks[place] = alive[begin : end + 1].max()
    return np.asarray(np.maximum(peaks - known, 0), np.int64)


def _graph(
    trace: Trace,
    whole: Pass,
    values: PassValues,
    table: _Table,
    held: list[_Held],
    scratch: I64,
    base_bytes: int,
) -> Graph:
    releases = _releases(held)
    after = np.array([until for until, _ in releases], np.int64)
    row_of = np.arange(len(table)) + np.searchsorted(after, np.arange(len(table)), "left")
    ops = len(table) + len(releases)
    names = [RELEASE] * ops
    before: list[set[int]] = [set() for _ in range(ops)]
    strings, columns = trace.strings, trace.ops
    traced = (table.rows + whole.start).tolist()
    kept_names = [strings[int(columns.name[row])] for row in traced]
    needs = dependencies(kept_names, table.reads, table.writes)
    for place, row in enumerate(row_of.tolist()):
        names[row] = kept_names[place]
        before[row] = {int(row_of[needed]) for needed in needs[place]}
    release_of = {
        one.value: until + 1 + number
        for number, ((until, _), group) in enumerate(releases.items())
        for one in group
    }
    makers, users = [], []
    for one in held:
        maker = int(row_of[one.maker]) if one.maker >= 0 else -1
        rows = {int(row_of[user]) for user in one.users}
        if one.value in release_of:
            before[release_of[one.value]] |= rows
            rows.add(release_of[one.value])
        for user in rows if maker >= 0 else ():
            before[user].add(maker)
        makers.append(maker)
        users.append(rows)
    all_scratch = np.zeros(ops, np.int64)
    all_scratch[row_of] = scratch
    before_start, before_rows = csr(before)
    users_start, users_rows = csr(users)
    chosen = np.array([one.value for one in held], np.int64)
    return Graph(
        name=names,
        scratch=all_scratch,
        before_start=before_start,
        before=before_rows,
        bytes=values.bytes[chosen],
        maker=np.array(makers, np.int64),
        lasts=np.array([one.lasts for one in held], np.bool_),
        users_start=users_start,
        users=users_rows,
        base_bytes=base_bytes,
        value_name=[strings[n] for n in trace.storages.name[values.storage[chosen]].tolist()],
    )


def _releases(held: list[_Held]) -> dict[tuple[int, int], list[_Held]]:
    """What the program holds beyond its last use, by where it lets go and where the last use is."""
    found: dict[tuple[int, int], list[_Held]] = {}
    for one in held:
        if not one.lasts and one.until > one.last_use:
            found.setdefault((one.until, one.last_use), []).append(one)
    return dict(sorted(found.items()))
