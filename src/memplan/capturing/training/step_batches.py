"""Counts what a training step is fed: batches, and samples where data loaders give them."""

from __future__ import annotations

import math
import statistics
import weakref
from collections import Counter, defaultdict
from typing import Any


class StepBatches:
    """A batch counts where a backward pass follows before its loader gives another one or ends:
    what is evaluated is not trained on."""

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        """Samples of the batches that each loader's iterator has asked its dataset for."""
        self._waiting: dict[int, float] = {}
        """Samples of the last batch of each iterator, by identity, until a backward pass; NaN where
        the dataset makes whole batches."""
        self._samples: defaultdict[int, float] = defaultdict(float)
        self._batches: Counter[int] = Counter()
        """Both by the number of optimizer steps completed."""
        self._copies = 0

    def asked(self, reading: Any, indices: Any) -> None:
        """A loader's iterator asks for a batch. One with workers asks for several ahead."""
        if reading._auto_collation:
            self._sizes.setdefault(reading, []).append(len(indices))

    def gave(self, reading: Any) -> None:
        sizes = self._sizes.get(reading)
        self._waiting[id(reading)] = statistics.median(sizes) if sizes else math.nan

    def ended(self, reading: Any) -> None:
        self._waiting.pop(id(reading), None)

    def backward(self, step: int, copies: int) -> None:
        """A backward pass begins after `step` optimizer steps and `copies` from the host."""
        if self._waiting:
            self._samples[step] += sum(self._waiting.values())
        self._batches[step] += bool(self._waiting) or copies > self._copies
        self._waiting.clear()
        self._copies = copies

    def in_steps(self, first: int, stop: int) -> tuple[float | None, float | None]:
        """Batches and samples of one of the steps `[first, stop)`, on average; None where none are
        seen."""
        steps = range(first, stop)
        batches = sum(self._batches[step] for step in steps) / (stop - first)
        samples = sum(self._samples[step] for step in steps) / (stop - first)
        return batches or None, None if math.isnan(samples) else samples or None
