"""A trace with its steady steps repeated: what a longer run of the job would ask for.

A capture ends as soon as its steps repeat, and what recurs need not be run again: its events are
written once more for each repetition. A storage that lives across the boundary of the round has a
successor, which takes its place one round later: a gradient that is freed at the start of a step
was allocated in the step before, so in the repetition the gradient of the last one is freed. Both
are found by what they are (size, stream, device, then the place that made them) and the order of
their allocation. What was made before and is not released in the round lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from memplan.types.trace import I64, EventKind, Storages, Trace

_UNMATCHED_BYTES = 1 << 20
"""Released in a round by storages whose successor was not found: beyond this nothing is said."""


@dataclass(frozen=True)
class Round:
    """Events `[start, stop)` of a trace, which a longer run repeats."""

    start: int
    stop: int
    steps: int
    rows: I64
    """The events that are repeated; a release without a counterpart is not."""
    born: I64
    """Storages that begin in the round, in order."""
    ended: I64
    """Storages from before that are released in it."""
    successor: I64
    """For each of `ended`, the element of `born` that takes its place."""
    unmatched_bytes: int
    """Released in the round by storages that have no successor."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def recurs(self) -> bool:
        """Whether what lives across its boundary was understood."""
        return self.unmatched_bytes <= _UNMATCHED_BYTES


def find_round(trace: Trace) -> Round | None:
    """The steps that the capture took for steady; None where there are none."""
    if len(trace.meta.steady_steps) != 2 or not len(trace):
        return None
    first, last = trace.meta.steady_steps
    step = np.maximum.accumulate(trace.events.step)
    start, stop = (int(edge) for edge in np.searchsorted(step, (first, last)))
    if not 0 < first < last or not 0 < start < stop:
        return None
    events = trace.events
    begun, gone = lifetimes(trace)
    inside = (begun >= start) & (begun < stop)
    born = np.flatnonzero(inside)
    born = born[np.argsort(begun[born], kind="stable")]
    survives = inside & ((gone < 0) | (gone >= stop))
    ended = np.flatnonzero((begun >= 0) & (begun < start) & (gone >= start) & (gone < stop))
    successor = _successors(trace, begun, ended, np.flatnonzero(survives))
    alone = ended[successor < 0]
    rows = np.arange(start, stop)
    if len(alone):
        rows = rows[~np.isin(events.storage[rows], alone)]
    return Round(
        start=start,
        stop=stop,
        steps=last - first,
        rows=rows,
        born=born,
        ended=ended[successor >= 0],
        successor=successor[successor >= 0],
        unmatched_bytes=int(events.bytes[begun[alone]].sum()),
    )


def repeated(trace: Trace, of: Round, times: int) -> tuple[Trace, I64]:
    """The trace with its round `times` more behind it, and by event the captured one that it
    repeats or is. Operators are not repeated: events refer to those of the captured round."""
    count, known = len(of.born), len(trace.storages)
    number = np.full(known, -1, np.int64)
    number[of.born] = np.arange(count)
    storage = trace.events.storage
    template = storage[of.rows]
    of_round = np.where(template >= 0, number[template], -1)
    heir = np.full(known, -1, np.int64)
    heir[of.ended] = of.successor
    inherited = np.where(template >= 0, heir[template], -1)
    parts = [storage[: of.stop]]
    before = 0
    for base in known + count * np.arange(times):
        # The first repetition releases what the captured round left, each other that of the one
        # before it.
        from_before = inherited if not before else before + number[inherited]
        part = np.where(of_round >= 0, base + of_round, template)
        parts.append(np.where(inherited >= 0, from_before, part))
        before = int(base)
    rest = storage[of.stop :]
    later = np.where(rest >= 0, number[rest], -1)
    parts.append(np.where((later >= 0) & (times > 0), before + later, rest))
    captured = np.concatenate(
        (np.arange(of.stop), np.tile(of.rows, times), np.arange(of.stop, len(trace)))
    )
    extra = np.zeros(len(captured), np.int32)
    length = len(of)
    extra[of.stop : of.stop + times * length] = np.repeat(
        np.arange(1, times + 1) * of.steps, length
    )
    extra[of.stop + times * length :] = times * of.steps
    columns = {
        column.name: getattr(trace.events, column.name)[captured] for column in fields(trace.events)
    }
    columns["storage"] = np.concatenate(parts)
    columns["step"] = (columns["step"] + extra).astype(np.int32)
    made = np.concatenate((np.arange(known), np.tile(of.born, times)))
    storages = Storages(
        **{c.name: getattr(trace.storages, c.name)[made] for c in fields(trace.storages)}
    )
    added = times * length
    shift = np.where(trace.ops.event >= of.stop, added, 0)
    longer = replace(
        trace,
        events=replace(trace.events, **columns),
        storages=storages,
        ops=replace(trace.ops, event=trace.ops.event + shift),
    )
    return longer, captured


def lifetimes(trace: Trace) -> tuple[I64, I64]:
    """The events of the allocation and of the first release of each storage; -1 for none."""
    events = trace.events
    begun = np.full(len(trace.storages), -1, np.int64)
    gone = np.full(len(trace.storages), -1, np.int64)
    rows = np.flatnonzero(events.kind == EventKind.ALLOC)
    begun[events.storage[rows]] = rows
    rows = np.flatnonzero((events.kind == EventKind.FREE) & (events.storage >= 0))[::-1]
    gone[events.storage[rows]] = rows
    return begun, gone


def _successors(trace: Trace, begun: I64, ended: I64, survivors: I64) -> I64:
    """For each of `ended`, the element of `survivors` that corresponds to it, in the order of
    allocation; -1 for none. They have the same size, stream and device, and the same place if
    possible."""
    events = trace.events
    found = np.full(len(ended), -1, np.int64)
    both = np.concatenate((ended, survivors))
    rows = begun[both]
    op = np.append(trace.ops.name, -1)[events.op[rows]]
    size = (events.bytes[rows], events.bytes_low[rows], events.bytes_high[rows])
    least = (*size, events.stream[rows], events.device[rows])
    place = (op, events.module[rows], events.source[rows], trace.storages.shape[both])
    free = np.ones(len(survivors), bool)
    for key in ((*least, *place), least):
        group = _numbered(key)
        mine = np.flatnonzero(found < 0)
        theirs = np.flatnonzero(free)
        left = _ranked(group[mine], rows[mine])
        right = _ranked(group[len(ended) + theirs], rows[len(ended) + theirs])
        _, a, b = np.intersect1d(left, right, assume_unique=True, return_indices=True)
        found[mine[a]] = survivors[theirs[b]]
        free[theirs[b]] = False
    return found


def _numbered(columns: tuple[np.ndarray, ...]) -> I64:
    """A number for each row of some columns, equal for equal rows."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, at = np.unique(column, return_inverse=True)
        number = np.unique(number * len(values) + at, return_inverse=True)[1].astype(np.int64)
    return number


def _ranked(group: I64, order: I64) -> I64:
    """A number for (group, rank within the group by `order`)."""
    by = np.lexsort((order, group))
    sorted_group = group[by]
    first = np.searchsorted(sorted_group, sorted_group)
    result = np.empty(len(group), np.int64)
    result[by] = sorted_group * (1 << 32) + (np.arange(len(group)) - first)
    return result
