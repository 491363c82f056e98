"""Counts what a training step is fed: batches, and samples where data loaders give them."""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset


@dataclass(eq=False)
class _Reading:
    """An iterator of a loader, which the job may let go while its batches wait.

    Attributes:
        sizes: samples of batches that it has asked its dataset for and not given yet.
        waiting: samples of those given since the last backward pass.
        unsure: whether the first of them may be for a later backward pass, or are fewer samples.
        step: the last one that its batches counted for; -1 before.
    """

    sizes: deque[int] = field(default_factory=deque)
    waiting: float = 0
    unsure: bool = False
    step: int = -1


class StepBatches:
    """Batches count for the first backward pass after them, unless they are evaluated: their loader
    ends after a model ran on the last one, or gives way to other batches after one ran without
    gradients. Where it is not clear what a step was fed, its samples are NaN."""

    def __init__(self) -> None:
        self._readings: weakref.WeakKeyDictionary[Any, _Reading] = weakref.WeakKeyDictionary()
        self._waiting: dict[_Reading, None] = {}
        """Those that gave batches since the last backward pass, in the order of the last ones."""
        self._evaluated: set[_Reading] = set()
        self._ran = self._ran_without_grad = False
        """Whether a model did since the last batch."""
        self._samples: defaultdict[int, float] = defaultdict(float)
        self._batches: Counter[int] = Counter()
        """Both by the number of optimizer steps completed."""
        self._copies = self._copies_before = 0
        """From the host, when the last backward pass began and when the last batch came."""

    def asked(self, reading: Any, indices: Any) -> None:
        """A loader's iterator asks for a batch. One with workers asks for several ahead."""
        if reading._auto_collation:
            self._readings.setdefault(reading, _Reading()).sizes.append(len(indices))

    def gave(self, reading: Any, copies: int) -> None:
        self._note_evaluated()
        one = self._readings.setdefault(reading, _Reading())
        one.waiting += one.sizes.popleft() if one.sizes else math.nan
        several = one in self._waiting
        if several and copies == self._copies_before and reading._world_size > 1:
            one.waiting = math.nan  # perhaps some are for other ranks
        one.unsure = several or isinstance(reading._dataset, IterableDataset)
        self._waiting.pop(one, None)
        self._waiting[one] = None
        self._ran = self._ran_without_grad = False
        self._copies_before = copies

    def model_runs(self, *, training: bool) -> None:
        self._ran = True
        self._ran_without_grad |= not training

    def _note_evaluated(self) -> None:
        if self._waiting and self._ran_without_grad:
            self._evaluated.add(next(reversed(self._waiting)))

    def ended(self, reading: Any, *, early: bool) -> None:
        """`early`: because it was told to. Else the last batch of a stream may have fewer samples
        than were asked for."""
        one = self._readings.pop(reading, _Reading())
        if self._ran and one in self._waiting:
            del self._waiting[one]
        elif isinstance(reading._dataset, IterableDataset) and not early:
            one.waiting = self._samples[one.step] = math.nan

    def backward(self, step: int, copies: int) -> None:
        """A backward pass begins after `step` optimizer steps and `copies` from the host."""
        if self._evaluated:
            self._note_evaluated()
        trained = self._waiting.keys() - self._evaluated
        if self._waiting and not trained:
            self._samples[step] = math.nan
        for one in trained:
            self._samples[step] += math.nan if one.unsure and one.step < 0 else one.waiting
        self._batches[step] += bool(self._waiting) or copies > self._copies
        for one in self._waiting:
            one.waiting, one.step = 0, step
        self._waiting.clear()
        self._evaluated.clear()
        self._copies = copies

    def in_steps(self, first: int, stop: int) -> tuple[float | None, float | None]:
        """Batches and samples of one of the steps `[first, stop)`, on average; None where none are
        seen, or it is not clear."""
        steps = range(first, stop)
        batches = sum(self._batches[step] for step in steps) / (stop - first)
        samples = sum(self._samples[step] for step in steps) / (stop - first)
        return batches or None, None if math.isnan(samples) else samples or None
