"""Gives the job the longest batches of its whole run while it is captured.

A capture sees the first batches of a loader. Where batches differ, the loader is read ahead
(`scan`). The job gets the largest batch until its steps repeat, and then one batch of each of some
other sizes; from these the simulator makes up the steps on all batches (`simulate.batches`).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from memplan.capturing.training.host_draws import HostDraws
from memplan.capturing.training.scan import LoaderScan, Scan, draws_anew, run_dry
from memplan.types.batches import Batches

if TYPE_CHECKING:
    from memplan.capturing.recording.recorder import Recorder

STEPS = 2
"""Steps of a training before loaders are read ahead: the first step differs from all others."""
_MOST_LOADERS = 16
"""The most copies of the process that wait at one time."""
_SIZES = 5
"""Number of batches of other sizes, beside the largest, the smallest and the widest."""
_TURNS = 2
"""The same for a loop that evaluates, where a turn may generate many tokens."""


class WholeRun:
    """Reads loaders ahead, and decides which batches the job gets."""

    def __init__(self, seconds: float, recorder: Recorder, draws: HostDraws) -> None:
        """`seconds`: time for all loaders together."""
        self._seconds = seconds
        self._recorder = recorder
        self._draws = draws
        self._ahead: WeakKeyDictionary[Any, LoaderScan] = WeakKeyDictionary()
        """Scans by loader, before the first batch of an epoch."""
        self._read: WeakKeyDictionary[Any, Scan] = WeakKeyDictionary()
        """Scans by iterator."""
        self._loaders: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """Loaders by iterator."""
        self._given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Number of batches that an iterator gave since the last step."""
        self._each: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Batches of each loader in the step before, of which a loop may have fetched one ahead."""
        self._feed: tuple[Any, Feed | Turns] | None = None
        self._compared: WeakSet[Any] = WeakSet()
        """Iterators that gave their largest batch before their own first one."""
        self._total = 0
        """Number of batches that the first steps took or fetched."""
        self.fetches_ahead = False
        """Whether the training loop has a batch in hand when a step ends."""
        self.notes: list[str] = []
        self.batches: list[Batches] = []

    def opened(self, loader: Any, read: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """An iterator of a loader, created by `read` (PyTorch's own)."""
        known = self._ahead.get(loader)
        if (known is None or known.answered) and len(self._ahead) < _MOST_LOADERS:
            self._ahead[loader] = LoaderScan(loader, read)
        iterator = read(loader)
        self._loaders[iterator] = loader
        return iterator

    def end(self) -> None:
        for scan in self._ahead.values():
            scan.end()

    def gave(self, iterator: Any) -> None:
        self._given[iterator] = self._given.get(iterator, 0) + 1

    def stepped(self, iterator: Any) -> None:
        given = self._given.pop(iterator, 1)
        self._each[iterator] = max(given, 1)
        self._total += given

    def look_ahead(self, iterator: Any, steps: int) -> None:
        """The job has done so many steps on the batches of an iterator: find out what comes."""
        each = self._each[iterator]
        self.fetches_ahead = self._total > each * STEPS
        found = self._scanned(iterator, "the data loader", "the largest (number {}) was given")
        if found is not None:
            self._feed = iterator, Feed(found, each, self.fetches_ahead)
            self.batches.append(
                Batches(
                    bytes=found.sizes,
                    dims=found.dims,
                    complete=found.complete,
                    drawn=draws_anew(self._loaders[iterator], self._draws),
                    each=each,
                    begun=steps - STEPS,
                    before=[found.largest] if iterator in self._compared else [],
                    given_from=steps,
                )
            )

    def evaluates(self, iterator: Any) -> None:
        """Another loader is read after the training: its largest batch comes first."""
        name = "another data loader"
        found = self._scanned(iterator, name, "the largest (number {}) and others were given")
        if found is not None:
            run = Batches(
                bytes=found.sizes,
                dims=found.dims,
                complete=found.complete,
                drawn=draws_anew(self._loaders[iterator], self._draws),
                before=[found.largest],
                given_from=1,
                first_unit=1,
            )
            self._compared.add(iterator)
            self.batches.append(run)
            self._feed = iterator, Turns(found, run, self._recorder, self.fetches_ahead)

    def trains(self) -> None:
        """What seemed an evaluation is a training, whose first steps are on its own batches."""
        self._total = 0
        if self._feed is not None and isinstance(self._feed[1], Turns):
            self._feed = None
            self.batches.pop()

    def _scanned(self, iterator: Any, name: str, given: str) -> Scan | None:
        """The scan of an iterator whose batches differ; else None."""
        found = self._result(iterator)
        if found is None or not found.sizes:
            return None
        every = f"{'all' if found.complete else 'the first'} {len(found.sizes):,} batches of {name}"
        said = [f"reading {name} ahead ended: {found.failed}"] if found.failed else []
        if found.varies:
            least, most = min(found.sizes), max(found.sizes)
            given = given.format(found.largest)
            said.append(
                f"{every} were read, without the model: {least:,} to {most:,} bytes; {given} to "
                "the job"
            )
        else:
            said.append(f"{every} have {found.sizes[0]:,} bytes")
        self.notes += [one for one in said if one not in self.notes]
        return found if found.varies and found.largest in found.kept else None

    def _result(self, iterator: Any) -> Scan | None:
        if iterator in self._read:
            return self._read[iterator]
        loader = self._loaders.get(iterator)
        scan = self._ahead.get(loader) if loader is not None else None
        if scan is None or scan.answered or self._seconds <= 0:
            return None
        began = time.monotonic()
        found = self._read[iterator] = scan.result(self._seconds)
        self._seconds -= time.monotonic() - began
        return found

    @property
    def feeding(self) -> bool:
        """Whether a training gets chosen batches."""
        return self._feed is not None and isinstance(self._feed[1], Feed)

    def ran_dry(self, iterator: Any) -> None:
        """An iterator gives no more although it has not given all."""
        run_dry(iterator, self._read.get(iterator))

    def given(self, iterator: Any) -> Any:
        """The batch that the job gets in place of the loader's own. Raises LookupError for none,
        StopIteration once all have been given."""
        if self._feed is None or self._feed[0] is not iterator:
            raise LookupError
        try:
            return next(self._feed[1])
        except StopIteration:
            self._feed = None
            raise

    @property
    def all_run(self) -> bool:
        """Whether a training has done its step on the last of the chosen batches."""
        feed = self._feed[1] if self._feed is not None else None
        return isinstance(feed, Feed) and feed.exhausted and not self.fetches_ahead

    def others(self, step: int) -> None:
        """The steps on the largest batch repeat after so many; those of other sizes come next."""
        assert self._feed is not None and isinstance(self._feed[1], Feed)
        feed, run = self._feed[1], self.batches[-1]
        feed.go_on()
        run.first_unit, run.others, run.units_each = step, feed.others, feed.units_each


class Turns:
    """Batches for a loop that evaluates: the largest, some others, and the largest again, with the
    events at which each was asked for."""

    def __init__(self, found: Scan, run: Batches, recorder: Recorder, ahead: bool) -> None:
        """`ahead`: like the training loop, the loop has a batch in hand when it asks for one, so
        that a last batch ends the turn of the one before."""
        self._run, self._recorder = run, recorder
        self._scan = found
        others = [one for one in found.spread(_TURNS) if one != found.largest]
        self._others = [*others, found.largest]
        self._rest = [found.largest, *self._others, *others[: int(ahead)]]

    def __next__(self) -> Any:
        self._recorder.flush()
        self._run.edges.append(len(self._recorder.builder))
        if not self._rest:
            self._run.others = self._others
            raise StopIteration
        return pickle.loads(self._scan.kept[self._rest.pop(0)])


class Feed:
    """Gives the largest batch again and again; once told so, one of each of some other sizes."""

    def __init__(self, found: Scan, each: int, ahead: bool) -> None:
        """`each`: batches that a step takes. `ahead`: whether one is in hand when a step ends."""
        self._scan, self._each = found, each
        # A loop that fetches a batch ahead mixes two sizes in the first of two steps.
        self.units_each = 2 if ahead and each > 1 else 1
        self._rest: list[int] | None = None

    def __next__(self) -> Any:
        if self._rest is None:
            return self._batch(self._scan.largest)
        if not self._rest:
            raise StopIteration
        return self._batch(self._rest.pop(0))

    @property
    def exhausted(self) -> bool:
        return self._rest == []

    def go_on(self) -> None:
        # Not in the order of size, which tells the steps on them apart; the largest comes once
        # more, after smaller ones, whose blocks it then finds split.
        others = [one for one in self._scan.spread(_SIZES) if one != self._scan.largest]
        middle = len(others) // 2
        largest = self._scan.largest
        self.others = [*others[:middle], largest, *others[middle:], largest]
        self._rest = [one for one in self.others for _ in range(self._each * self.units_each)]

    def _batch(self, number: int) -> Any:
        return pickle.loads(self._scan.kept[number])
