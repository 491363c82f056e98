"""Measures the time of data loaders for a batch, once the job is over.

During a capture, work on the CPU goes through the capture, which slows it, or happens in workers,
where it is not watched. So each loader that fed the steady steps is asked for a few more batches
when the capture is over, in this process and at full speed.
"""

from __future__ import annotations

import signal
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import chain
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils.data import DataLoader, IterableDataset

from memplan.capturing.patches.attributes import Patches
from memplan.types.step_time import InputTime

_SECONDS = 0.2
"""The most seconds to spend, beside one batch in any case."""
_MOST = 8
_MOST_SECONDS = 5.0
"""The most seconds for all loaders."""


class _Loader:
    """What a loader's iterator makes batches of, and how."""

    def __init__(self, reading: Any) -> None:
        """`reading`: an iterator of a `DataLoader`."""
        self.dataset = reading._dataset
        self.workers: int = reading._num_workers
        self._indices = chain(reading._sampler_iter, reading._index_sampler)
        self._auto_collation: bool = reading._auto_collation
        self._collate_fn = reading._collate_fn
        # A stream goes on where it is; only the process that reads it has it.
        self._fetcher = getattr(reading, "_dataset_fetcher", None)

    def seconds(self) -> float | None:
        """Median seconds of one process for a batch; None where they cannot be measured."""
        if isinstance(self.dataset, IterableDataset) and self._fetcher is None:
            return None
        took: list[float] = []
        threads = torch.get_num_threads()
        try:
            if self.workers:
                torch.set_num_threads(1)  # as a worker does
            fetch = self._fetching()
            while len(took) < _MOST and sum(took) < _SECONDS:
                start = time.perf_counter()
                batch = fetch()
                took.append(time.perf_counter() - start)
                if any(isinstance(leaf, FakeTensor) for leaf in _pytree.tree_leaves(batch)):
                    return None  # nothing was computed
        except Exception:  # the job's own code, after its end
            pass
        finally:
            torch.set_num_threads(threads)
        return statistics.median(took) if took else None

    def _fetching(self) -> Callable[[], object]:
        if self._fetcher is not None:
            fetch = self._fetcher.fetch
            return lambda: fetch(next(self._indices))
        how: dict[str, Any] = (
            {"batch_sampler": self._indices}
            if self._auto_collation
            else {"batch_size": None, "sampler": self._indices}
        )
        return iter(DataLoader(self.dataset, collate_fn=self._collate_fn, **how)).__next__


class InputTimes:
    """Follows which loaders feed which steps."""

    def __init__(self) -> None:
        self._batches: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        """Batches taken in each step, by identity of the dataset and number of workers."""
        self._reading: weakref.WeakSet[Any] = weakref.WeakSet()
        """Iterators of loaders. They are not kept alive, because a dataset may be on the card."""
        self._loaders: dict[tuple[int, int], _Loader] = {}

    def gave(self, reading: Any, step: int) -> None:
        """Note that a loader's iterator gave a batch after so many optimizer steps."""
        self._reading.add(reading)
        self._batches[id(reading._dataset), reading._num_workers][step] += 1

    def keep(self) -> None:
        """Enough steps were seen: from now on keep the iterators being read, to measure them."""
        for reading in self._reading:
            self._loaders[id(reading._dataset), reading._num_workers] = _Loader(reading)

    def measured(self, first: int, stop: int) -> list[InputTime]:
        """Times of the loaders that fed the steps `[first, stop)`; empty where one of them cannot
        be measured. To be called when CUDA is no longer fake: what needs it is refused."""
        patches = Patches()
        patches.set(torch.cuda, "_lazy_init", _refuse)
        found = []
        before = signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, _MOST_SECONDS)
        try:
            for key, one in self._loaders.items():
                count = sum(self._batches[key][step] for step in range(first, stop))
                if not count:
                    continue
                seconds = one.seconds()
                if seconds is None:
                    return []
                found.append(InputTime(seconds, count / (stop - first), one.workers))
        except _TooLongError:
            return []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            patches.undo()
        return found


class _TooLongError(BaseException):
    """A dataset waits for something that the job, which has ended, would have given it."""


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise _TooLongError


def _refuse() -> NoReturn:
    raise RuntimeError("the capture is over: there is no device")
