"""A run over batches of different sizes, made up from the captured steps on some of them.

Steps on other batches differ in the sizes of what they ask for (and in what some kernels take for
themselves), and each size is a polynomial of the batch's: linear for activations, quadratic for
attention scores. So the steps that were captured on batches of a few sizes tell those of all: where
a polynomial of degree two gives each captured size to the byte it is taken, elsewhere what lies
between the two nearest. What lives from a step into the next is followed by its place in the step
that made it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from memplan.types.trace import I64, Batches, EventKind, Phase, Storages, Trace

_MOST_EVENTS = 2_000_000
"""That are made up: a second or two for each replay."""
_MOST_AHEAD = 2
"""Batches that a loop fetches before it needs them, at most."""
_UNKNOWN_BYTES = 1 << 20
"""Released in a step though made neither in it nor in the one before: beyond this no step is made
up."""
_ALIKE = 0.9
"""Correlation of a step's bytes with its batch's."""
_AROUND = 8
"""Batches, the last of them a large one, that are taken from the end of a long run."""
_SIZES = ("bytes", "bytes_low", "bytes_high")
_DEGREE = 2
_EXACT = 0.5
"""Bytes."""


@dataclass(frozen=True)
class MadeUp:
    """The longer trace."""

    trace: Trace
    captured: I64
    """By event the captured one that it is or is made from."""
    steps: int
    """That were made up."""


@dataclass(frozen=True)
class _Sample:
    """A captured step."""

    size: int
    """Of its batch, in bytes."""
    begin: int
    end: int
    """Its events."""
    born: I64
    """Storages that begin in it, in order."""
    survivors: I64
    """Numbers, in `born`, of those that the next step finds alive."""
    kind: bytes
    """What is the same in steps that differ in sizes only."""
    storage: I64
    """By event: the number in `born`; `_BEFORE` and the number among the survivors of the step
    before; `_OLDER` and the storage; or -1."""
    stays: np.ndarray
    """By event, whether it recurs: the release of what is older comes once."""


_BEFORE, _OLDER, _GONE = 1 << 24, 1 << 40, -2


def with_batches(trace: Trace) -> MadeUp | None:
    """The job on an epoch's batches, in their order: its first steps as captured, then a step for
    each batch (or so many as a step takes, run as the largest of them is) in place of the captured
    ones on chosen batches, then what follows. None where the captured steps do not tell:
    too few sizes, or steps that leave other things alive.

    Of more batches than can be replayed the first are taken, and those around the largest.
    """
    batches = trace.meta.batches
    if len(batches.shown) < 2 or batches.given_from < 1:
        return None
    number = np.maximum.accumulate(trace.events.step)
    edges = np.searchsorted(number, np.arange(int(number[-1]) + 2)).tolist()
    late = _ahead(trace, edges)
    if late is None:
        return None
    samples = [
        _sample(trace, size, *edges[step - 1 : step + 2])
        for step, size in zip(_steps(batches, late), batches.shown, strict=True)
    ]
    own = batches.given_from + late
    before = _sample(trace, 0, edges[own - 2] if own > 1 else 0, edges[own - 1], edges[own])
    like = [one for one in samples if len(one.survivors) == len(before.survivors)]
    # The last one says what becomes of its tensors in what follows.
    if len({one.size for one in like}) < 2 or like[-1] is not samples[-1]:
        return None
    for one in like:
        once = trace.events.bytes[one.begin : one.end][~one.stays]
        if int(once.sum()) > _UNKNOWN_BYTES:
            return None
    steps = len(batches.bytes) // batches.each
    sizes = np.array(batches.bytes[: steps * batches.each], np.int64).reshape(steps, -1)[own:]
    chosen = _replayed(sizes.max(axis=1), max(_MOST_EVENTS // max(map(_length, like)), 1))
    return _longer(trace, before, like, sizes[chosen])


def _steps(batches: Batches, late: int) -> range:
    """Those on the batches that were shown, the last of several on each."""
    first = batches.first_step + late + batches.steps_each - 1
    return range(first, first + len(batches.shown) * batches.steps_each, batches.steps_each)


def _ahead(trace: Trace, edges: list[int]) -> int | None:
    """How many steps later than they were given a loop may have had its batches: as many as make
    the bytes that steps ask for follow those of the batches; None where they never do."""
    batches, events = trace.meta.batches, trace.events
    asked = np.cumsum(np.append(0, np.where(events.kind == EventKind.ALLOC, events.bytes, 0)))
    total = np.diff(asked[edges])
    alike = {}
    for late in range(_MOST_AHEAD + 1):
        steps = _steps(batches, late)
        if steps[-1] < len(total) and total[steps].std() > 0:
            alike[late] = float(np.corrcoef(total[steps], batches.shown)[0, 1])
    best = max(alike, key=lambda late: alike[late], default=None)
    return best if best is not None and alike[best] >= _ALIKE else None


def _sample(trace: Trace, size: int, before: int, begin: int, end: int) -> _Sample:
    """The step of events `[begin, end)`; the one before begins at `before`."""
    events = trace.events

    def made(start: int, stop: int) -> I64:
        storages = events.storage[start:stop]
        begun: I64 = storages[(events.kind[start:stop] == EventKind.ALLOC) & (storages >= 0)]
        return begun

    earlier, own = made(before, begin), made(begin, end)
    alive = earlier[~np.isin(earlier, _released(trace, before, begin))]
    survivors = np.flatnonzero(~np.isin(own, _released(trace, begin, end)))
    number = np.arange(len(trace.storages)) + _OLDER
    number[alive] = np.arange(len(alive)) + _BEFORE
    number[own] = np.arange(len(own))
    rows = slice(begin, end)
    meant = events.storage[rows]
    storage = np.where(meant >= 0, number[meant], -1)
    op = np.append(trace.ops.name, -1)[events.op[rows]]
    same = (events.kind[rows], events.stream[rows], events.device[rows], op, storage)
    kind = b"".join(np.ascontiguousarray(column, np.int64).tobytes() for column in same)
    stays = (events.kind[rows] != EventKind.FREE) | (storage < _OLDER)
    return _Sample(size, begin, end, own, survivors, kind, storage, stays)


def _released(trace: Trace, start: int, stop: int) -> I64:
    events = trace.events
    released: I64 = events.storage[start:stop][events.kind[start:stop] == EventKind.FREE]
    return released


def _length(sample: _Sample) -> int:
    return sample.end - sample.begin


def _replayed(sizes: I64, most: int) -> I64:
    """Which batches, in order."""
    if len(sizes) <= most:
        return np.arange(len(sizes))
    largest = np.argsort(-sizes, kind="stable")[: max(most // (4 * _AROUND), 1)]
    around = (largest[:, None] + np.arange(1 - _AROUND, 1)).ravel()
    first = np.arange(max(most - len(around), 0))
    return np.unique(np.concatenate((first, around[around >= 0])))


def _longer(trace: Trace, before: _Sample, samples: list[_Sample], sizes: I64) -> MadeUp:
    """`before`: the last step that stays as it was captured. `sizes`: by step and batch in it."""
    events, known = trace.events, len(trace.storages)
    start, stop = before.end, samples[-1].end
    models = _models(trace, samples)
    by_size = sorted(samples, key=lambda one: one.size)
    ends = np.array([one.size for one in by_size])
    rows, storage, born, asked = [], [], [], []
    alive, base = before.born[before.survivors], known
    for of_step in sizes.tolist():
        # A size between two samples of different operators: as the larger one.
        like = by_size[min(int(np.searchsorted(ends, max(of_step))), len(ends) - 1)]
        meant = like.storage[like.stays]
        part = np.where(meant >= _OLDER, meant - _OLDER, meant)
        own = (meant >= 0) & (meant < _BEFORE)
        part[own] += base
        earlier = (meant >= _BEFORE) & (meant < _OLDER)
        part[earlier] = alive[meant[earlier] - _BEFORE]
        rows.append(np.arange(like.begin, like.end)[like.stays])
        storage.append(part)
        born.append(like.born)
        asked.append(models[like.kind].step(of_step))
        alive, base = base + like.survivors, base + len(like.born)

    heir = np.arange(known + 1)
    gone = events.storage[start:stop][events.kind[start:stop] == EventKind.ALLOC]
    heir[gone] = _GONE
    heir[samples[-1].born[samples[-1].survivors]] = alive
    rest = np.arange(stop, len(trace))
    rest = rest[heir[events.storage[rest]] != _GONE]
    captured = np.concatenate((np.arange(start), *rows, rest))
    columns = {name.name: getattr(events, name.name)[captured] for name in fields(events)}
    later = events.storage[rest]
    columns["storage"] = np.concatenate(
        (events.storage[:start], *storage, np.where(later >= 0, heir[later], later))
    )
    lengths = [len(part) for part in rows]
    made = slice(start, start + sum(lengths))
    for row, name in enumerate(_SIZES):
        columns[name][made] = np.concatenate([part[row] for part in asked])
    first = int(events.step[:start].max(initial=0))
    columns["step"][made] = np.repeat(np.arange(1, len(sizes) + 1) + first, lengths)
    columns["step"][made.stop :] = first + 1 + len(sizes)
    _release_what_was_asked(columns, made, base)
    of = np.concatenate((np.arange(known), *born))
    storages = {c.name: getattr(trace.storages, c.name)[of] for c in fields(Storages)}
    longer = replace(
        trace,
        events=replace(events, **columns),
        storages=Storages(**storages),
        ops=replace(trace.ops, event=_moved(trace.ops.event, start, rest, made.stop)),
        _cache={},
    )
    return MadeUp(longer, captured, len(sizes))


def _moved(at: I64, start: int, rest: I64, behind: int) -> I64:
    """Where events `at` are in the longer trace: up to `start` where they were, those of steps that
    are no more at `start`, and those that stay, `rest`, from `behind` on."""
    later = behind + np.searchsorted(rest, at)
    first = int(rest[0]) if len(rest) else int(at.max(initial=0)) + 1
    return np.where(at < start, at, np.where(at < first, start, later))


@dataclass(frozen=True)
class _Model:
    """What steps like one sample ask for, by the size of the batch."""

    at: I64
    """Sizes of samples, rising."""
    known: np.ndarray
    """By size, column of `_SIZES` and event: what the samples asked for, and, where one of them
    has no such event, what lies between others."""
    coefficients: np.ndarray
    """By power, the highest first, column and event: of the polynomials."""
    exact: np.ndarray
    """By column and event, whether these give what the samples asked for."""
    batch: I64
    """By event, which batch of the step it belongs to."""

    def step(self, sizes: list[int]) -> I64:
        """As `sizes`, of a step on several batches, each event by its own."""
        found = self.sizes(sizes[0])
        for number, size in enumerate(sizes[1:], 1):
            found = np.where(self.batch >= number, self.sizes(size), found)
        return found

    def sizes(self, size: int) -> I64:
        """By column of `_SIZES` and event, bytes; outside of what is known those of its end, but
        for what is exact."""
        right = int(np.clip(np.searchsorted(self.at, size), 1, len(self.at) - 1))
        low, high = self.at[right - 1], self.at[right]
        share = min(max((size - low) / (high - low), 0.0), 1.0)
        between = self.known[right - 1] + share * (self.known[right] - self.known[right - 1])
        powers = np.vander([size / self.at[-1]], _DEGREE + 1)[0]
        curve = np.tensordot(powers, self.coefficients, 1)
        rounded: I64 = np.rint(np.maximum(np.where(self.exact, curve, between), 0)).astype(np.int64)
        return rounded


def _models(trace: Trace, samples: list[_Sample]) -> dict[bytes, _Model]:
    """By kind. Steps of another kind, with scratch memory that others do not ask for, tell of what
    they have in common."""
    places = {one.size: _places(trace, one) for one in samples}
    at = np.array(sorted(places))
    models = {}
    for like in {one.kind: one for one in samples}.values():
        here = _places(trace, like)[like.stays]
        asked = [_asked_at(trace, one, places[one.size], here) for one in _by_size(samples)]
        known = np.stack(asked)
        flat = known.reshape(len(at), -1)
        terms = np.vander(at / at[-1], _DEGREE + 1)
        coefficients = np.zeros((_DEGREE + 1, flat.shape[1]))
        exact = np.zeros(flat.shape[1], bool)
        patterns, of = np.unique(~np.isnan(flat), axis=1, return_inverse=True)
        for number, there in enumerate(patterns.T):
            columns = np.flatnonzero(of.ravel() == number)
            part = flat[np.ix_(there, columns)]
            flat[:, columns] = _between(at, at[there], part)
            if there.sum() > _DEGREE:
                found = np.linalg.lstsq(terms[there], part, rcond=None)[0]
                coefficients[:, columns] = found
                exact[columns] = np.abs(terms[there] @ found - part).max(axis=0) < _EXACT
        shape = known.shape[1:]
        batch = _batches_before(trace, like)
        models[like.kind] = _Model(
            at, known, coefficients.reshape(-1, *shape), exact.reshape(shape), batch
        )
    return models


def _by_size(samples: list[_Sample]) -> list[_Sample]:
    """One of each size, rising."""
    return [one for _, one in sorted({one.size: one for one in samples}.items())]


def _places(trace: Trace, sample: _Sample) -> np.ndarray:
    """By event a row that names the same request in every step: module, phase and operator, what
    the event is and how it is known, and the how-manieth such it is. Other sizes may run an
    operator more in a module (one that pads), which leaves the names of the rest as they are."""
    events, rows = trace.events, slice(sample.begin, sample.end)
    op = np.append(trace.ops.name, -1)[events.op[rows]]
    what = (events.module[rows], events.phase[rows], op, events.kind[rows], events.provenance[rows])
    columns = np.stack(what, axis=1).astype(np.int64)
    group = np.unique(columns, axis=0, return_inverse=True)[1].ravel()
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], group[order])
    count = np.empty(len(group), np.int64)
    count[order] = np.arange(len(group)) - starts
    return np.column_stack((columns, count))


def _asked_at(trace: Trace, sample: _Sample, places: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """By column of `_SIZES` and place, what a step asked for there; NaN where there is no such."""
    both = np.unique(np.vstack((places, wanted)), axis=0, return_inverse=True)[1].ravel()
    where = np.full(len(both), -1, np.int64)
    where[both[: len(places)]] = np.arange(len(places))
    row = where[both[len(places) :]]
    rows = slice(sample.begin, sample.end)
    found = np.stack([getattr(trace.events, name)[rows][row] for name in _SIZES]).astype(float)
    found[:, row < 0] = np.nan
    return found


def _between(at: I64, known_at: I64, known: np.ndarray) -> np.ndarray:
    """What lies between known values, or beyond them at the nearest."""
    right = np.clip(np.searchsorted(known_at, at), 1, max(len(known_at) - 1, 1))
    if len(known_at) == 1:
        return np.repeat(known, len(at), axis=0)
    low, high = known_at[right - 1], known_at[right]
    share = np.clip((at - low) / (high - low), 0.0, 1.0)[:, None]
    return np.asarray(known[right - 1] + share * (known[right] - known[right - 1]))


def _batches_before(trace: Trace, sample: _Sample) -> I64:
    """By event, how many backward passes of the step have ended."""
    backward = trace.events.phase[sample.begin : sample.end] == Phase.BACKWARD
    ended = np.append(False, backward[:-1] & ~backward[1:])
    number: I64 = np.cumsum(ended)[sample.stays]
    return number


def _release_what_was_asked(columns: dict[str, np.ndarray], made: slice, storages: int) -> None:
    """A release has the bytes of its storage, which may be of a batch of another size."""
    storage, kind = columns["storage"], columns["kind"]
    begun = np.flatnonzero((kind == EventKind.ALLOC) & (storage >= 0))
    gone = np.arange(made.start, made.stop)
    gone = gone[(kind[made] == EventKind.FREE) & (storage[made] >= 0)]
    for name in _SIZES:
        of = np.zeros(storages, np.int64)
        of[storage[begun]] = columns[name][begun]
        columns[name][gone] = of[storage[gone]]
