"""Epochs like the one that was seen, which a script runs through without batches.

What follows the last of them, an evaluation on all the data or a checkpoint, is reached that way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from memplan.capturing.training.scan import bytes_of_a_sample
from memplan.types.deadline import Deadline
from memplan.types.installed import is_installed

_SECONDS = 2.0
_SECONDS_OF_LOOKS = 3.0
_MOST_LOADERS = 1000
"""Beyond them a loop counts steps, not epochs, and has no end without batches."""

_Origin: TypeAlias = tuple[Any, ...]


class LaterEpochs:
    """Knows the data loaders that a training reads, also where each epoch makes its own."""

    def __init__(self) -> None:
        self.begun = False
        """They run without batches."""
        self._origins: WeakKeyDictionary[Any, _Origin] = WeakKeyDictionary()
        self._in_steps: WeakSet[Any] = WeakSet()
        """Iterators that gave a batch after the first optimizer step; those of a trial run of the
        evaluation before did not."""
        self._trained: set[_Origin] = set()
        self._samples: dict[_Origin, set[float]] = {}
        """Bytes of a sample in the batches of this training."""
        self._skipped = 0
        self._deadline = Deadline(_SECONDS, cpu_time=True)
        self._looks = Deadline(_SECONDS_OF_LOOKS, cpu_time=True)
        self._opened: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """How often each loader was opened, where it was read twice at first."""
        self._read: set[tuple[_Origin, int]] = set()
        """Where loaders were opened, and of which data."""

    def opened(self, loader: Any, iterator: Any) -> None:
        self._origins[iterator] = origin = _origin(loader)
        self._opened[loader] = 2
        self._read.add((origin, id(loader.dataset)))

    def repeats(self, loader: Any) -> bool:
        """Whether a loader like this one was opened here in an earlier epoch."""
        return self.begun and (_origin(loader), id(loader.dataset)) in self._read

    def gave(self, iterator: Any, batch: Any, step: int) -> None:
        origin = self._origins.get(iterator)
        if origin is None:
            return
        if not self.begun:
            self._samples.setdefault(origin, set()).add(bytes_of_a_sample(batch))
        if step > 0:
            self._in_steps.add(iterator)

    def trained_on(self, iterators: Iterable[Any]) -> None:
        self._trained.update(self._origins[one] for one in iterators if one in self._in_steps)

    def begin(self) -> None:
        self.begun = True
        self._deadline = Deadline(_SECONDS, cpu_time=True)
        self._looks = Deadline(_SECONDS_OF_LOOKS, cpu_time=True)

    def end(self) -> None:
        """Another training has begun."""
        self.begun = False
        self._samples.clear()

    def skips(self, loader: Any, first_batch: Callable[[Any], Any]) -> bool:
        """Whether a loader that is opened is one of these epochs'."""
        origin = _origin(loader)
        skips = (
            self.begun
            and origin in self._trained
            and not self._has_larger_samples(loader, origin, first_batch)
        )
        self._skipped += skips
        return skips

    def _has_larger_samples(
        self, loader: Any, origin: _Origin, first_batch: Callable[[Any], Any]
    ) -> bool:
        """Whether samples that were all alike are larger now, as where images grow from stage to
        stage. A new loader is looked into, and one that is known in turns that grow rarer."""
        self._opened[loader] = times = self._opened.get(loader, 0) + 1
        before = self._samples.get(origin, set())
        if len(before) != 1 or times & (times - 1) or self._looks.passed:
            return False
        larger = False
        with suppress(Exception):  # of the job's own code, or a loader without batches
            larger = bytes_of_a_sample(first_batch(loader)) > max(before)
        self._deadline = Deadline(_SECONDS, cpu_time=True)
        return larger

    @property
    def are_endless(self) -> bool:
        return self._skipped > _MOST_LOADERS or (self._skipped > 0 and self._deadline.passed)


def _origin(loader: Any) -> _Origin:
    """The place where the job opens a loader, and what it reads."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    samples = None
    with suppress(Exception):  # of a stream, or whatever the job's own data raise
        samples = len(loader.dataset)
    place = frame.f_code.co_filename, frame.f_lineno
    kind = type(loader.dataset)  # perhaps a class that each call defines anew
    batch_size = getattr(loader, "batch_size", None)
    return *place, kind.__module__, kind.__qualname__, samples, batch_size
