"""Epochs like the one that was seen, which a script runs through without batches.

What follows the last of them, an evaluation on all the data or a checkpoint, is reached that way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from memplan.capturing.training.brought_forward import INSTALLED
from memplan.types.deadline import Deadline

_SECONDS = 2.0
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
        self._skipped = 0
        self._deadline = Deadline(_SECONDS, cpu_time=True)

    def opened(self, loader: Any, iterator: Any) -> None:
        self._origins[iterator] = _origin(loader)

    def gave(self, iterator: Any, step: int) -> None:
        if step > 0 and iterator in self._origins:
            self._in_steps.add(iterator)

    def trained_on(self, iterators: Iterable[Any]) -> None:
        self._trained.update(self._origins[one] for one in iterators if one in self._in_steps)

    def begin(self) -> None:
        self.begun = True
        self._deadline = Deadline(_SECONDS, cpu_time=True)

    def skips(self, loader: Any) -> bool:
        """Whether a loader that is opened is one of these epochs'."""
        skips = self.begun and _origin(loader) in self._trained
        self._skipped += skips
        return skips

    @property
    def are_endless(self) -> bool:
        return self._skipped > _MOST_LOADERS or (self._skipped > 0 and self._deadline.passed)


def _origin(loader: Any) -> _Origin:
    """The place where the job opens a loader, and what it reads."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSTALLED):
        frame = frame.f_back
    samples = None
    with suppress(Exception):  # of a stream, or whatever the job's own data raise
        samples = len(loader.dataset)
    place = frame.f_code.co_filename, frame.f_lineno
    return *place, type(loader.dataset), samples, loader.batch_size
