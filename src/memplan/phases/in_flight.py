"""Passes in flight beside each other, as micro-batches on a pipeline stage: forwards of later ones
come before a forward's backward.

Such a step is looked at as if one pass stood alone, its forward right before its backward, while
the others in flight hold what they keep in between.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from memplan.phases.passes import Pass, StepPasses, alive_after, call_numbers
from memplan.types.trace import I64, EventKind, Events, Ops, Phase, Trace

_EDGES = ("reads_start", "reads", "writes_start", "writes")


@dataclass(frozen=True)
class InFlight:
    """The pass of a step with the highest peak in backward, the first of several."""

    trace: Trace
    """The trace with the forward moved."""
    order: I64
    """The order of its operators, as numbers of the given trace."""
    chosen: Pass
    whole: Pass
    """The pass from the step's first forward to its last backward."""
    passes: int
    others: int
    """Passes in flight beside the chosen one while its backward runs."""


def in_flight(trace: Trace, found: StepPasses) -> InFlight | None:
    """None where no pass is in flight beside another; where passes differ in their operators, as
    those of unlike stages on one rank; and where a backward comes in parts."""
    passes, ops = found.passes, trace.ops
    blocks = _forwards(trace, found)
    if not blocks or len({_names(trace, *block) for block in blocks}) > 1:
        return None
    alive = alive_after(trace)
    peaks = [int(alive[ops.event[p.backward] : p.last_event + 1].max()) for p in passes]
    at = peaks.index(max(peaks))
    one, (first, stop) = passes[at], blocks[at]
    others = sum(
        begin < one.backward < other.backward
        for other, (begin, _) in zip(passes, blocks, strict=True)
    )
    if not others:
        return None
    order = _order(len(ops), first, np.arange(stop, one.backward), np.arange(first, stop))
    moved = _moved(trace, first, stop, one.backward, order)
    start = one.backward - (stop - first)
    chosen = replace(one, start=start, first_event=int(moved.ops.event[start]))
    whole = replace(passes[-1], start=passes[0].start, first_event=passes[0].first_event)
    return InFlight(moved, order, chosen, whole, len(passes), others)


def _forwards(trace: Trace, found: StepPasses) -> list[tuple[int, int]]:
    """The rows of each pass's forward: from the first call of a module whose results its backward
    reads, up to the next such call or to backward. Empty where a pass has no such call, or two
    passes have the same."""
    ops, events = trace.ops, trace.events
    call, _ = call_numbers(ops.call)
    call[ops.phase == Phase.BACKWARD] = -1
    made = (events.kind == EventKind.ALLOC) & (events.op >= found.passes[0].start)
    made_in = np.full(len(trace.storages), -1, np.int64)
    made_in[events.storage[made]] = call[events.op[made]]
    begins = []
    for one in found.passes:
        calls = made_in[ops.reads[ops.reads_start[one.backward] : ops.reads_start[one.stop]]]
        if (calls < 0).all():
            return []
        begins.append(int((call == calls[calls >= 0].min()).argmax()))
    if len(set(begins)) < len(begins):
        return []
    ends = np.sort([*begins, *(one.backward for one in found.passes)])
    return [(row, int(ends[np.searchsorted(ends, row, "right")])) for row in begins]


def _names(trace: Trace, first: int, stop: int) -> bytes:
    """The operators of calls, and of which call each is."""
    call, name = trace.ops.call[first:stop], trace.ops.name[first:stop]
    inside = call >= 0
    number = np.unique(call[inside], return_inverse=True)[1]
    return name[inside].tobytes() + number.tobytes()


def _moved(trace: Trace, first: int, stop: int, before: int, op_order: I64) -> Trace:
    """The trace with the operators `[first, stop)` and their events moved right before operator
    `before`. Events in between that concern their storages, such as a release, follow right behind
    them."""
    events, ops = trace.events, trace.ops
    begin, end, at = ops.event[[first, stop, before]].tolist()
    made = events.storage[begin:end][events.kind[begin:end] == EventKind.ALLOC]
    stays = ~np.isin(events.storage[end:at], made)
    between = np.arange(end, at)
    event_order = _order(len(events), begin, between[stays], np.arange(begin, end), between[~stays])
    event = ops.event.copy()
    event[first:stop] += int(stays.sum())
    earlier = np.append(0, np.cumsum(stays))
    event[stop:before] = begin + earlier[event[stop:before] - end]
    caused = np.append(np.argsort(op_order), -1)[events.op]
    event_columns: dict[str, Any] = {
        one.name: getattr(events, one.name)[event_order] for one in fields(events)
    }
    event_columns["op"] = caused[event_order]
    op_columns: dict[str, Any] = {
        one.name: getattr(ops, one.name)[op_order] for one in fields(ops) if one.name not in _EDGES
    }
    op_columns["event"] = event[op_order]
    for start, items in (_EDGES[:2], _EDGES[2:]):
        rows = _rows(getattr(ops, start), getattr(ops, items), op_order)
        op_columns[start], op_columns[items] = rows
    return replace(trace, events=Events(**event_columns), ops=Ops(**op_columns))


def _order(count: int, start: int, *pieces: I64) -> I64:
    """Numbers of `count` rows, with those from `start` on in the order of the pieces."""
    moved = np.concatenate(pieces)
    return np.concatenate((np.arange(start), moved, np.arange(start + len(moved), count)))


def _rows(start: I64, items: I64, order: I64) -> tuple[I64, I64]:
    """Rows of a CSR column in another order."""
    lengths = np.diff(start)[order]
    begins = np.append(0, np.cumsum(lengths))
    return begins, items[
        np.repeat(start[:-1][order] - begins[:-1], lengths) + np.arange(begins[-1])
    ]
