"""The batches of a whole run: its longest ones are given to the job while it is captured.

A capture sees the first batches that a loader gives. Where these are not alike, the loader is read
ahead (`scan`), and the job gets the largest of its batches until its steps repeat, and then one of
each of some other sizes: from these the simulator makes up the steps of all (`simulate.batches`).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from memplan.capturing.training.scan import LoaderScan, Scan
from memplan.types.trace import Batches

_MOST_LOADERS = 16
"""Copies of the process that wait at one time."""
_SIZES = 5
"""Batches of other sizes, beside the largest, the smallest and the widest."""


class WholeRun:
    """Reads loaders ahead, and says which batches the job gets."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for all loaders together."""
        self._seconds = seconds
        self._scans: WeakKeyDictionary[Any, LoaderScan] = WeakKeyDictionary()
        """By loader, before its first batch."""
        self._loaders: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """By iterator."""
        self._given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Batches that an iterator gave since the last step."""
        self._each: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """In the step before: a loop may have fetched one ahead of the first."""
        self._feed: tuple[Any, Feed] | None = None
        self.notes: list[str] = []
        self.batches = Batches()

    def opened(self, loader: Any, read: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """An iterator of a loader, as `read` (PyTorch's own) makes it."""
        if loader not in self._scans and len(self._scans) < _MOST_LOADERS:
            self._scans[loader] = LoaderScan(loader, read)
        iterator = read(loader)
        self._loaders[iterator] = loader
        return iterator

    def end(self) -> None:
        for scan in self._scans.values():
            scan.end()

    def gave(self, iterator: Any) -> None:
        self._given[iterator] = self._given.get(iterator, 0) + 1

    def stepped(self, iterator: Any) -> None:
        self._each[iterator] = max(self._given.pop(iterator, 1), 1)

    def look_ahead(self, iterator: Any, steps: int) -> None:
        """The job has done so many steps on the batches of an iterator: what comes?"""
        found = self._scanned(iterator)
        if found is None or not found.sizes:
            return
        every = f"{'all' if found.complete else 'the first'} {len(found.sizes):,} batches"
        if found.failed:
            self.notes.append(f"reading the data loader ahead ended: {found.failed}")
        if not found.varies:
            self.notes.append(f"{every} of the data loader have {found.sizes[0]:,} bytes")
            return
        least, most = min(found.sizes), max(found.sizes)
        self.notes.append(
            f"{every} of the data loader were read, without the model: {least:,} to {most:,} "
            f"bytes; the largest (number {found.largest}) was given to the job"
        )
        if found.largest in found.kept:
            each = self._each[iterator]
            self._feed = iterator, Feed(found, each)
            self.batches = Batches(
                bytes=found.sizes, complete=found.complete, each=each, given_from=steps
            )

    def _scanned(self, iterator: Any) -> Scan | None:
        loader = self._loaders.get(iterator)
        scan = self._scans.get(loader) if loader is not None else None
        if scan is None or self._seconds <= 0:
            return None
        began = time.monotonic()
        found = scan.result(self._seconds)
        self._seconds -= time.monotonic() - began
        return found

    @property
    def feeding(self) -> bool:
        return self._feed is not None

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

    def others(self, step: int) -> None:
        """The steps on the largest batch repeat, after so many: now those of other sizes."""
        assert self._feed is not None
        feed = self._feed[1]
        feed.go_on()
        self.batches.first_step = step
        self.batches.shown, self.batches.steps_each = feed.shown, feed.steps_each


class Feed:
    """The largest batch again and again, and once told so each of some others, and no more."""

    def __init__(self, found: Scan, each: int) -> None:
        """`each`: batches that a step takes."""
        self._scan, self._each = found, each
        # A loop that fetches a batch ahead mixes two sizes in the first of two steps.
        self.steps_each = 1 if each == 1 else 2
        self._rest: list[int] | None = None

    def __next__(self) -> Any:
        if self._rest is None:
            return self._batch(self._scan.largest)
        if not self._rest:
            raise StopIteration
        return self._batch(self._rest.pop(0))

    def go_on(self) -> None:
        # Not in the order of size, which tells the steps on them apart; the largest comes once
        # more, after smaller ones, whose blocks it then finds split.
        others = [one for one in self._scan.spread(_SIZES) if one != self._scan.largest]
        middle = len(others) // 2
        order = [*others[:middle], self._scan.largest, *others[middle:], self._scan.largest]
        self.shown = [self._scan.sizes[one] for one in order]
        self._rest = [one for one in order for _ in range(self._each * self.steps_each)]

    def _batch(self, number: int) -> Any:
        return pickle.loads(self._scan.kept[number])
