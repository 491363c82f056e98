"""How a capture ends: not in the middle of an epoch, if what comes after it can still be reached.

Once a step repeats, more training steps show nothing new, but the evaluation and the checkpoint at
the end of the epoch may. So the data loaders that are being read run dry, the script goes on to
whatever follows, with a few batches from each loader it opens, and is stopped when it trains again
or after a time limit.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.data import dataloader

from memplan.capture.enough import EnoughSeen
from memplan.capture.mode import CaptureMode
from memplan.capture.patching import Patches
from memplan.capture.patience import Patience

_BATCHES_AFTER = 3
_SECONDS_AFTER = 20.0
_STEPS_AHEAD = 1
"""Optimizer steps on batches that were fetched before the loader ran dry: Accelerate's loaders look
one batch ahead, to know the last one when they give it out."""
_FORWARDS_AHEAD = 8
"""The same, where a step is not completed."""


class Ending:
    """Decides when the script has shown enough, and stops it."""

    def __init__(self, mode: CaptureMode) -> None:
        self.mode = mode
        self.draining = False
        self._reading: weakref.WeakSet[Any] = weakref.WeakSet()
        self._batches: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._patience: Patience | None = None
        self._evaluated = False
        self._opened_another = False
        """A loader has given batches that was not being read when all ran dry."""
        self._dry: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps_left = _STEPS_AHEAD
        self._forwards_left = _FORWARDS_AHEAD

    def install(self, patches: Patches) -> None:
        """Let data loaders run dry on demand, until `patches.undo()`."""
        iterator = dataloader._BaseDataLoaderIter
        real_next = iterator.__next__

        def next_batch(loader: Any) -> Any:
            if self.draining:
                self._allow(loader)
            batch = real_next(loader)
            self._reading.add(loader)
            return batch

        real_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self.before_backward()
            return real_backward(*args, **kwargs)

        real_reset = iterator._reset

        def reset(reading: Any, *args: Any, **kwargs: Any) -> None:
            # Another epoch of an iterator whose workers persist: as if it were another iterator.
            self._forget(reading)
            real_reset(reading, *args, **kwargs)

        patches.set(iterator, "__next__", next_batch)
        patches.set(iterator, "_reset", reset)
        patches.set(torch.autograd, "_engine_run_backward", run_backward)

    def begin(self, *, at_once: bool) -> None:
        """Enough training steps were seen: drain the loaders being read, or stop right here."""
        if at_once or not self._reading:
            self.stop()
        self.draining = self.mode.answers.finishing = True
        self._patience = Patience(_SECONDS_AFTER)
        self.mode.on_real_op = self._watch_time

    def model_runs(self, *, training: bool) -> None:
        """One that no other module called, which asks for memory of the device or has some."""
        if not self.draining:
            return
        if not training:
            self._evaluated = True
        elif not self._evaluated:
            self._forwards_left -= 1
            if self._forwards_left < 0:
                self.stop()
        self._watch_time()

    def before_backward(self) -> None:
        """On another loader's batch that is training; what only runs forward may be an evaluation
        that keeps its gradients."""
        if self.draining and self._opened_another and not self._evaluated:
            self.stop()

    def after_step(self) -> None:
        """An optimizer stepped, though enough was seen: on a batch in hand, or in another epoch."""
        self._steps_left -= 1
        if self._evaluated or self._opened_another or self._steps_left < 0:
            self.stop()

    def _watch_time(self) -> None:
        """What the host computes after the epoch (weights merged for a checkpoint) has an end."""
        if self._patience is not None and self._patience.over:
            self.stop()

    def stop(self) -> None:
        """Raises EnoughSeen, here and at every operator that the script may still try."""
        self.mode.recorder.flush()
        self.mode.recorder.finished = True
        raise EnoughSeen

    def _allow(self, loader: Any) -> None:
        """Raises StopIteration for a loader that has given enough."""
        if loader in self._reading and loader not in self._batches:
            self._reading.discard(loader)
            self._dry.add(loader)
        if loader in self._dry:
            raise StopIteration
        self._opened_another = True
        self._batches[loader] = self._batches.get(loader, 0) + 1
        if self._batches[loader] > _BATCHES_AFTER:
            raise StopIteration

    def _forget(self, loader: Any) -> None:
        self._reading.discard(loader)
        self._dry.discard(loader)
        self._batches.pop(loader, None)

    @property
    def saw_evaluation(self) -> bool:
        """Whether anything ran without gradients, on batches of another loader, since the loaders
        began to run dry."""
        return self._evaluated and self._opened_another
