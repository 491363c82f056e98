"""A job that does not do what was captured: requests left out, put in twice, or of another size;
an evaluation between two steps; a last batch of another size."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from memplan.phases.steps import find_steps
from memplan.types.trace import I64, EventKind, Phase, Trace


def perturbed(trace: Trace, share: float, seed: int) -> Trace:
    """The trace with so great a share of its requests changed at random: a third is left out, with
    the release; a third is made twice, and released twice; a third has between half and one and a
    half times its size."""
    random = np.random.default_rng(seed)
    events = trace.events
    asked = np.flatnonzero((events.kind == EventKind.ALLOC) & (events.bytes > 0))
    chosen = asked[random.random(len(asked)) < share]
    what = random.integers(0, 3, len(chosen))
    times = np.ones(len(trace.storages), np.int64)
    times[events.storage[chosen[what == 0]]] = 0
    times[events.storage[chosen[what == 1]]] = 2
    sizes = events.bytes.copy()
    resized = chosen[what == 2]
    factor = random.uniform(0.5, 1.5, len(resized))
    sizes[resized] = np.maximum(sizes[resized] * factor, 1).astype(np.int64)
    return _rebuilt(trace, np.where(events.storage >= 0, times[events.storage], 1), sizes)


def with_last_batch(trace: Trace, factor: float) -> Trace:
    """The last whole step with every request that it also releases times a factor: the batch that
    is left at the end of the data."""
    table = find_steps(trace)
    start, stop = table[len(table) - 1]
    events = trace.events
    freed = np.full(len(trace.storages), len(trace))
    rows = np.flatnonzero((events.kind == EventKind.FREE) & (events.storage >= 0))
    freed[events.storage[rows]] = rows
    inside = np.arange(len(trace))
    small = (events.kind == EventKind.ALLOC) & (inside >= start) & (inside < stop)
    small &= np.isin(events.phase, (Phase.FORWARD, Phase.BACKWARD))
    small &= freed[events.storage] < stop
    sizes = np.where(small, np.maximum(events.bytes * factor, 1), events.bytes)
    sizes[events.bytes == 0] = 0
    return _rebuilt(trace, np.ones(len(trace), np.int64), sizes.astype(np.int64))


def with_evaluation(trace: Trace) -> Trace:
    """Before the last step its forward passes once more, each value released when the next but
    three is there: an evaluation, which keeps nothing for backward."""
    table = find_steps(trace)
    start, stop = table[len(table) - 1]
    events = trace.events
    rows = np.arange(start, stop)
    asked = rows[(events.kind[start:stop] == EventKind.ALLOC) & (events.bytes[start:stop] > 0)]
    asked = asked[events.phase[asked] == Phase.FORWARD]
    first = len(trace.storages) + np.arange(len(asked))
    kept = 4
    order = np.argsort(
        np.concatenate((2 * np.arange(len(asked)), 2 * (np.arange(len(asked)) + kept) + 1)),
        kind="stable",
    )
    source = np.concatenate((asked, asked))[order]
    kind = np.repeat([EventKind.ALLOC, EventKind.FREE], len(asked))[order]
    at = np.concatenate((np.arange(start), source, np.arange(start, len(trace))))
    columns = {field.name: getattr(events, field.name)[at] for field in fields(events)}
    inserted = slice(start, start + len(source))
    columns["kind"][inserted] = kind
    columns["storage"][inserted] = np.concatenate((first, first))[order]
    columns["phase"][inserted] = Phase.EVALUATION
    columns["step"][inserted] = events.step[start]
    columns["op"][inserted] = -1
    return _with_storages(trace, columns, events.storage[asked])


def _rebuilt(trace: Trace, times: I64, sizes: I64) -> Trace:
    """The trace with each event so many times, those of a storage all alike, and other sizes."""
    events = trace.events
    rows = np.repeat(np.arange(len(trace)), times)
    again = np.zeros(len(rows), np.bool_)
    again[1:] = rows[1:] == rows[:-1]
    columns = {field.name: getattr(events, field.name)[rows] for field in fields(events)}
    columns |= dict.fromkeys(("bytes", "bytes_low", "bytes_high"), sizes[rows])
    doubled, number = np.unique(columns["storage"][again], return_inverse=True)
    columns["storage"][again] = len(trace.storages) + number
    return _with_storages(trace, columns, doubled)


def _with_storages(trace: Trace, columns: dict[str, np.ndarray], like: I64) -> Trace:
    """The trace with other events, and storages more that are like these."""
    storages = trace.storages
    rows = np.concatenate((np.arange(len(storages)), like))
    table = {field.name: getattr(storages, field.name)[rows] for field in fields(storages)}
    return replace(trace, events=type(trace.events)(**columns), storages=type(storages)(**table))
