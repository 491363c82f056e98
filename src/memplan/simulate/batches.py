"""A run over batches of different sizes, made up from the captured steps on some of them.

Steps on other batches differ in the sizes of what they ask for, in what some kernels take for
themselves, and in operators that only aligned batches or others need. So the steps that were
captured on batches of a few sizes tell those of all (`sizes`). What lives from a step into the next
is followed by its place in the step that made it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from memplan.simulate.sizes import Sizes
from memplan.types.batches import Batches
from memplan.types.trace import I64, EventKind, Phase, Storages, Trace

_MOST_EVENTS = 2_000_000
"""The most events that are made up: a second or two for each replay."""
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
_MULTIPLES = (64, 32, 16, 8, 4, 2)


@dataclass(frozen=True)
class MadeUp:
    """The longer trace."""

    trace: Trace
    captured: I64
    """For each event the captured event that it is or is made from."""
    steps: int = 0
    """Optimizer steps that were made up."""
    turns: int = 0
    """Turns of loops that evaluate, likewise."""


@dataclass(frozen=True, eq=False)
class _Sample:
    """A captured step."""

    batch: int
    """Its number in the epoch."""
    size: int
    """Its size in bytes."""
    begin: int
    end: int
    """The event at which it ends."""
    born: I64
    """Storages that begin in it, in order."""
    survivors: I64
    """Numbers, in `born`, of those that the next step finds alive."""
    kind: bytes
    """What is the same in steps that differ in sizes only."""
    storage: I64
    """What each event refers to: a number in `born`; `_BEFORE` plus a number among the survivors of
    the step before; `_OLDER` plus a storage; or -1."""
    stays: np.ndarray
    """Whether each event recurs. The release of an older storage happens only once."""


_BEFORE, _OLDER, _GONE = 1 << 24, 1 << 40, -2


def with_batches(trace: Trace, order: int = 0) -> MadeUp:
    """The job on the batches of whole epochs, in their order: what runs first as captured, then a
    step for each batch (or so many as a step takes, run as the largest of them is) in place of the
    captured ones on chosen batches, then what follows. So are loops that evaluate. What was
    captured stays where that does not tell: too few sizes, or steps that leave other things alive.

    Of more batches than can be replayed the first are taken, and those around the largest. `order`:
    another one for each number but 0, where each run of the job draws its own.
    """
    runs = [run for run in trace.meta.batches if len(run.others) > 1 and run.given_from > 0]
    found = MadeUp(trace, np.arange(len(trace)))
    for number, run in reversed(list(enumerate(runs, 1))):  # events of earlier ones stay in place
        room = _MOST_EVENTS + len(trace) - len(found.trace)
        more = _with_run(found.trace, run, room // number, order if run.drawn else 0)
        if more is not None:
            found = MadeUp(
                more.trace,
                found.captured[more.captured],
                found.steps + more.steps,
                found.turns + more.turns,
            )
    return found


def _with_run(trace: Trace, batches: Batches, most_events: int, order: int) -> MadeUp | None:
    edges = batches.edges
    if not edges:
        number = np.maximum.accumulate(trace.events.step)
        edges = np.searchsorted(number, np.arange(int(number[-1]) + 2)).tolist()
    late = _ahead(trace, batches, edges)
    if late is None:
        return None
    samples = [
        _sample(trace, batches, number, *_around(edges, unit))
        for unit, number in zip(_units(batches, late), batches.others, strict=True)
    ]
    own = batches.given_from + late
    before, like = _kept(trace, batches, edges, own, samples)
    if len(like) < 2:  # the first of a loop may leave other things alive than those that follow
        own += 1
        before, like = _kept(trace, batches, edges, own, samples)
    # The last one says what becomes of its tensors in what follows.
    if len({one.size for one in like}) < 2 or like[-1] is not samples[-1]:
        return None
    for one in like:
        once = trace.events.bytes[one.begin : one.end][~one.stays]
        if int(once.sum()) > _UNKNOWN_BYTES:
            return None
    of_steps = not batches.edges
    begun = batches.begun if of_steps else batches.begun + late  # edges: batches are asked for
    numbers = np.arange(len(batches.bytes) // batches.each * batches.each)
    numbers = numbers.reshape(-1, batches.each)[own - begun :]
    if order:
        numbers = np.random.default_rng(order).permutation(numbers.ravel()).reshape(numbers.shape)
    sizes = np.array(batches.bytes)[numbers].max(axis=1)
    chosen = _replayed(sizes, max(most_events // max(map(_length, like)), 1))
    first = {}
    if batches.before and batches.each == 1:
        given = [*batches.before, *(range(len(batches.bytes)) if of_steps else batches.others)]
        first = {
            _sample(trace, batches, given[unit - begun], *_around(edges, unit)): unit - begun
            for unit in range(begun, own)
        }
    return _longer(trace, batches, before, like, numbers[chosen], first)


def _kept(
    trace: Trace, batches: Batches, edges: list[int], own: int, samples: list[_Sample]
) -> tuple[_Sample, list[_Sample]]:
    """The last of so many units that stay as they were captured, and the later ones that leave as
    many tensors alive."""
    before = _sample(trace, batches, 0, *_around(edges, own - 1))
    count = len(before.survivors)
    later = [one for one in samples if one.begin >= before.end]
    return before, [one for one in later if len(one.survivors) == count]


def _around(edges: list[int], unit: int) -> tuple[int, int, int]:
    """Events at which the unit before one begins, the unit itself, and the next."""
    return edges[unit - 1] if unit else 0, edges[unit], edges[unit + 1]


def _units(batches: Batches, late: int) -> range:
    """The steps with batches that were shown, the last one for each batch."""
    first = batches.first_unit + late + batches.units_each - 1
    return range(first, first + len(batches.others) * batches.units_each, batches.units_each)


def _ahead(trace: Trace, batches: Batches, edges: list[int]) -> int | None:
    """How many units later than they were given a loop may have had its batches: as many as make
    the bytes that they ask for follow those of the batches; None where they never do."""
    events = trace.events
    shown = [batches.bytes[number] for number in batches.others]
    asked = np.cumsum(np.append(0, np.where(events.kind == EventKind.ALLOC, events.bytes, 0)))
    total = np.diff(asked[edges])
    alike = {}
    for late in range(_MOST_AHEAD + 1):
        units = _units(batches, late)
        if units[-1] < len(total) and total[units].std() > 0:
            alike[late] = float(np.corrcoef(total[units], shown)[0, 1])
    best = max(alike, key=lambda late: alike[late], default=None)
    return best if best is not None and alike[best] >= _ALIKE else None


def _sample(trace: Trace, run: Batches, batch: int, before: int, begin: int, end: int) -> _Sample:
    """The step on a batch, of events `[begin, end)`; the one before begins at `before`."""
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
    return _Sample(batch, run.bytes[batch], begin, end, own, survivors, kind, storage, stays)


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


def _longer(
    trace: Trace,
    run: Batches,
    before: _Sample,
    samples: list[_Sample],
    numbers: I64,
    first: dict[_Sample, int],
) -> MadeUp:
    """`before`: the last unit that stays as it was captured. `numbers`: of batches, by unit and
    place in it. `first`: units up to `before` that were captured on other batches than the
    loader's, with the numbers of these.
    """
    events, known, of_steps = trace.events, len(trace.storages), not run.edges
    start, stop = before.end, samples[-1].end
    models = _models(trace, run, [*samples, *first])
    kinds = _Kinds(run, samples)
    rows, storage, born, asked = [], [], [], []
    alive, base = before.born[before.survivors], known
    for of_step in numbers.tolist():
        like = kinds.like(of_step)
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
        for one, number in first.items():
            columns[name][one.begin : one.end][one.stays] = models[one.kind].step([number])[row]
    if of_steps:
        done = int(events.step[:start].max(initial=0))
        columns["step"][made] = np.repeat(np.arange(1, len(numbers) + 1) + done, lengths)
        columns["step"][made.stop :] += done + len(numbers) - int(events.step[:stop].max())
    changed = min((one.begin for one in first), default=start)
    _release_what_was_asked(columns, slice(changed, made.stop), base)
    of = np.concatenate((np.arange(known), *born))
    storages = {c.name: getattr(trace.storages, c.name)[of] for c in fields(Storages)}
    longer = replace(
        trace,
        events=replace(events, **columns),
        storages=Storages(**storages),
        ops=replace(trace.ops, event=_moved(trace.ops.event, start, rest, made.stop)),
    )
    steps = len(numbers) if of_steps else 0
    return MadeUp(longer, captured, steps, len(numbers) - steps)


class _Kinds:
    """Which sample runs the operators of a step on other batches: the next larger one. Where an
    operator is for batches only whose dimension is a multiple of a power of two (aligned operands
    need no padding) or for the others, the next larger one of these."""

    def __init__(self, run: Batches, samples: list[_Sample]) -> None:
        self._run = run
        self._samples = _by_size(samples)
        dims = range(len(run.dims))
        splits = [None, *((dim, multiple) for multiple in _MULTIPLES for dim in dims)]
        # Of several that explain as much the largest multiple, for padding takes more.
        self._split = min(splits, key=self._unlike)
        self._aligned = [self._is_aligned([one.batch], self._split) for one in self._samples]

    def _unlike(self, split: tuple[int, int] | None) -> int:
        """How often the next larger sample runs others."""
        groups: dict[bool, list[bytes]] = {}
        for one in self._samples:
            groups.setdefault(self._is_aligned([one.batch], split), []).append(one.kind)
        return sum(a != b for group in groups.values() for a, b in pairwise(group))

    def _is_aligned(self, numbers: list[int], split: tuple[int, int] | None) -> bool:
        if split is None:
            return False
        dim, multiple = split
        return all(self._run.dims[dim][number] % multiple == 0 for number in numbers)

    def like(self, numbers: list[int]) -> _Sample:
        wanted = self._is_aligned(numbers, self._split)
        size = max(self._run.bytes[number] for number in numbers)
        among = [
            one
            for one, aligned in zip(self._samples, self._aligned, strict=True)
            if aligned == wanted
        ] or self._samples
        return next((one for one in among if one.size >= size), among[-1])


def _moved(at: I64, start: int, rest: I64, behind: int) -> I64:
    """The positions of the events `at` in the longer trace. Those up to `start` stay. Those of
    steps that are left out are at `start`; the remaining ones, from `rest` on, are at `behind` and
    later."""
    later = behind + np.searchsorted(rest, at)
    first = int(rest[0]) if len(rest) else int(at.max(initial=0)) + 1
    return np.where(at < start, at, np.where(at < first, start, later))


@dataclass(frozen=True)
class _Model:
    """What steps like one sample ask for, by the batch."""

    run: Batches
    sizes: Sizes
    """The sizes of requests: the columns of `_SIZES` of all events, in a row."""
    batch: I64
    """For each event the batch of the step to which it belongs."""

    def step(self, numbers: list[int]) -> I64:
        """As `_asked`, for a step with several batches, each event by its own batch."""
        found = self._asked(numbers[0])
        for place, number in enumerate(numbers[1:], 1):
            found = np.where(self.batch >= place, self._asked(number), found)
        return found

    def _asked(self, number: int) -> I64:
        """Bytes by column of `_SIZES` and event."""
        found = self.sizes.of(self.run.bytes[number], _dims(self.run, [number])[0])
        (expected, *_), (_, low, _), (_, _, high) = found.reshape(3, len(_SIZES), -1)
        least, most = found.reshape(3, len(_SIZES), -1)[1:, 0]
        rows = np.stack((expected, np.minimum(low, least), np.maximum(high, most)))
        rounded: I64 = np.rint(rows).astype(np.int64)
        return rounded


def _dims(run: Batches, numbers: list[int]) -> np.ndarray:
    """The dimensions of batches, one row for each batch."""
    columns = run.dims or [run.bytes]
    return np.array([[column[number] for column in columns] for number in numbers], float)


def _models(trace: Trace, run: Batches, samples: list[_Sample]) -> dict[bytes, _Model]:
    """A model for each kind of step. Steps of different kinds, with different scratch memory, share
    what they have in common."""
    places = {one.begin: _places(trace, one) for one in samples}
    models = {}
    for like in {one.kind: one for one in samples}.values():
        of = _by_size([*samples, like])  # of its size itself: some requests are its own
        at = np.array([one.size for one in of])
        dims = _dims(run, [one.batch for one in of])
        here = places[like.begin][like.stays]
        known = np.stack([_asked_at(trace, one, places[one.begin], here) for one in of])
        sizes = Sizes(at, dims, known.reshape(len(at), -1))
        models[like.kind] = _Model(run, sizes, _batches_before(trace, like))
    return models


def _by_size(samples: list[_Sample]) -> list[_Sample]:
    """One of each size, rising."""
    return [one for _, one in sorted({one.size: one for one in samples}.items())]


def _places(trace: Trace, sample: _Sample) -> np.ndarray:
    """For each event a row that names the same request in every step: module, phase, operator, kind
    of event, and its number among equal ones. With another size, a module may run one more operator
    (padding), which leaves the names of the others as they are."""
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
    """Bytes that a step asked for, by column of `_SIZES` and place; NaN for no request."""
    both = np.unique(np.vstack((places, wanted)), axis=0, return_inverse=True)[1].ravel()
    where = np.full(len(both), -1, np.int64)
    where[both[: len(places)]] = np.arange(len(places))
    row = where[both[len(places) :]]
    rows = slice(sample.begin, sample.end)
    found = np.stack([getattr(trace.events, name)[rows][row] for name in _SIZES]).astype(float)
    found[:, row < 0] = np.nan
    return found


def _batches_before(trace: Trace, sample: _Sample) -> I64:
    """For each event, how many backward passes of the step have ended."""
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
