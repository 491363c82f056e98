"""How a capture ends: not in the middle of an epoch, if what comes after it can still be reached.

Once a step repeats, more training steps show nothing new, but the evaluation and the checkpoint at
the end of the epoch may. So the data loaders that are being read run dry, and the script goes on to
whatever follows, with a few batches from each loader it opens. Where no loader is read, or training
goes on since a reader opens its loader again, the loop around the step ends (`PlainLoops`).

A training that then holds more than the one before (another model, larger batches, layers
unfrozen), or after a plain loop one with another kind of optimizer, is another one: it is followed
as the first was. After a step of one that does not, the epochs to come run without batches, to what
follows the last; the script is stopped when it trains once more or after a time limit. A loader
whose batches leave memory behind, as where predictions are collected, is read to its end.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.utils.data import dataloader

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.job_observer import JobObserver
from memplan.capturing.state import CaptureState
from memplan.capturing.training.batch_sizes import BatchSizes
from memplan.capturing.training.brought_forward import bring_forward, later_conditions
from memplan.capturing.training.host_draws import HostDraws
from memplan.capturing.training.input_time import InputTimes
from memplan.capturing.training.later_epochs import LaterEpochs
from memplan.capturing.training.left_behind import LeftBehind
from memplan.capturing.training.needs import MORE, Needs
from memplan.capturing.training.periods import Periods
from memplan.capturing.training.plain_loops import PlainLoops
from memplan.capturing.training.readers import expects_no_end
from memplan.capturing.training.step_batches import StepBatches
from memplan.capturing.training.waits import Waits
from memplan.capturing.training.whole_run import WholeRun
from memplan.types.batches import Batches
from memplan.types.deadline import Deadline

_BATCHES_AFTER = 3
_SECONDS_AFTER = 20.0
_STEPS_AHEAD = 1
"""Optimizer steps that may follow once the loader ran dry, on batches that were fetched before:
Accelerate's loaders fetch one batch ahead, so that they know the last one when they return it."""
_FORWARDS_AHEAD = 8
"""The same for forward passes where no step is completed, each with as many calls of modules as one
that a backward pass follows."""
_MOST_TRAININGS = 8


class Ending:
    """Decides when the script has shown enough, and stops it."""

    def __init__(self, state: CaptureState, draws: HostDraws, scan_seconds: float = 0.0) -> None:
        """`scan_seconds`: time for reading loaders ahead; 0 for none."""
        self.state = state
        self.whole_run = WholeRun(scan_seconds, state.recorder, draws) if scan_seconds else None
        self.inputs = InputTimes()
        self.step_batches = StepBatches()
        self.draining = False
        self.later = LaterEpochs()
        self.loops = PlainLoops()
        self._periods = Periods(lambda: state.recorder.builder.step)
        self._waits = Waits()
        self._reading: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: weakref.ref[Any] | None = None
        """The iterator that was last read."""
        self._batches: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._deadline: Deadline | None = None
        self._dry: weakref.WeakSet[Any] = weakref.WeakSet()
        self._left = LeftBehind(state)
        self.needs = Needs(state.recorder)
        self._calls, self._most_calls = 0, 1
        """Modules that the script itself called since a backward pass, and before most of them."""
        self._trainings, self._sizes = 1, BatchSizes()
        self._conditions: list[str] = []
        """What the loop around the step will decide otherwise in later steps."""
        self.another_training: Callable[[], None] = lambda: None
        """Called when another training begins."""
        self._begun_with: int | None = None
        """Bytes when a loader was first opened for a training."""
        self.optimizer_is_new: Callable[[], bool] = lambda: False
        """Whether an optimizer has yet to step."""
        self._nothing_seen()

    def _nothing_seen(self) -> None:
        self._evaluated = False
        self._opened_another = False
        """Whether a loader has given batches that was not being read when all ran dry."""
        self._brought = False
        self._steps_left = _STEPS_AHEAD
        self._forwards_left: float = _FORWARDS_AHEAD

    def install(self, patches: Patches, observer: JobObserver) -> None:
        """Let data loaders run dry on demand, until `patches.undo()`."""
        self._install_in_loaders(patches)
        self._install_in_iterators(patches)
        observer.on_backward(self._before_backward)
        self.loops.install(patches)
        self._periods.install(patches)

    def _install_in_iterators(self, patches: Patches) -> None:
        iterator = dataloader._BaseDataLoaderIter
        real_init: Any = iterator.__init__
        real_next = iterator.__next__
        real_index: Any = iterator._next_index
        real_reset = iterator._reset

        @functools.wraps(real_init)
        def init(reading: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            real_init(reading, loader, *args, **kwargs)
            if not isinstance(loader, dataloader.DataLoader):  # fastai's is a class of its own
                if self._skips(loader):
                    self._dry.add(reading)
                self.later.opened(loader, reading)
                self.loops.opened(reading)

        def next_batch(reading: Any) -> Any:
            try:
                batch = read_on(reading)
            except StopIteration:
                self.step_batches.ended(reading, early=self.draining)
                raise
            self.step_batches.gave(reading, self.state.copies_from_host)
            self.inputs.gave(reading, self.state.recorder.builder.step)
            self.later.gave(reading, batch, self.state.recorder.builder.step)
            self.loops.gave(reading)
            return batch

        def read_on(reading: Any) -> Any:
            if self.whole_run is not None:
                with suppress(LookupError):
                    return self._fed(reading, self.whole_run)
            if self.draining:
                self._allow(reading)
            batch = real_next(reading)
            self._reading.add(reading)
            if self.whole_run is not None:
                self.whole_run.gave(reading)
                self._last = weakref.ref(reading)
            return batch

        def next_index(reading: Any) -> Any:
            indices = real_index(reading)
            self.step_batches.asked(reading, indices)
            return indices

        def reset(reading: Any, loader: Any, first_iter: bool = False) -> None:
            # Another epoch of an iterator whose workers persist: as if it were another iterator.
            if not first_iter:
                self._forget(reading)
            real_reset(reading, loader, first_iter)

        patches.set(iterator, "__init__", init)
        patches.set(iterator, "__next__", next_batch)
        patches.set(iterator, "_next_index", next_index)
        patches.set(iterator, "_reset", reset)

    def _install_in_loaders(self, patches: Patches) -> None:
        real_init: Any = dataloader.DataLoader.__init__
        real_iter: Any = dataloader.DataLoader.__iter__
        real_next = dataloader._BaseDataLoaderIter.__next__

        @functools.wraps(real_init)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            real_init(loader, *args, **kwargs)
            self._sizes.made(loader)

        @functools.wraps(real_iter)
        def read(loader: Any) -> Any:
            self._sizes.read(loader)
            if self._skips(loader, lambda it: real_next(real_iter(it))):
                return iter(())
            if self.whole_run is not None and not self.later.repeats(loader):
                iterator = self.whole_run.opened(loader, real_iter)
            else:
                iterator = real_iter(loader)
            self.later.opened(loader, iterator)
            self.loops.opened(iterator)
            return iterator

        patches.set(dataloader.DataLoader, "__init__", init)
        patches.set(dataloader.DataLoader, "__iter__", read)

    def _skips(self, loader: Any, first_batch: Callable[[Any], Any] = iter) -> bool:
        """Whether it is of epochs to come. A loop of them without an end is told to end."""
        if self._trains_on_top() or not self.later.skips(loader, first_batch):
            return False
        if self.later.are_endless and self.loops.used:
            self.later.end()  # the loop's turn needs batches
        elif self.later.are_endless and not self.loops.end_endless():
            self.stop()
        return self.later.begun

    def _trains_on_top(self) -> bool:
        """Whether the training that a loader is opened for needs more memory than one before, by
        its optimizer or because what an earlier one made is kept."""
        self.state.recorder.flush()
        alive = self.state.recorder.live_bytes
        if self._begun_with is None:
            self._begun_with = alive
        if self.optimizer_is_new() and alive > self._begun_with + MORE and self.later.begun:
            self._begun_with = alive
            self._steps_left, self._forwards_left = _BATCHES_AFTER, _FORWARDS_AHEAD
            return True
        return self.needs.will_be_more

    def look_ahead(self, steps: int, *, last: bool) -> None:
        """To be called after so many steps. With the last of the steps that differ from others,
        read the loader ahead that was last read."""
        iterator = self._last() if self._last is not None else None
        if self.whole_run is not None and iterator is not None:
            self.whole_run.stepped(iterator)
            if last:
                self.whole_run.look_ahead(iterator, steps)

    def _fed(self, loader: Any, whole_run: WholeRun) -> Any:
        if self.draining and self._is_another(loader) and loader not in self._batches:
            whole_run.evaluates(loader)
        try:
            batch = whole_run.given(loader)
        except StopIteration:
            if not self.draining:
                self._drain()
                self._allow(loader)
            if self._left.before(loader) < MORE and not expects_no_end():
                raise
            raise LookupError from None  # see `_allow`
        if self.draining:
            self._opened_another = True
            self._batches[loader] = self._batches.get(loader, 0) + 1
            self._left.before(loader)
        return batch

    def begin(self, *, at_once: bool, steps: int) -> None:
        """To be called when enough training steps were seen, `steps` of them. Batches of other
        sizes come next, if there are any; then the loaders being read run dry, or the loop ends, or
        the script is stopped here."""
        self.inputs.keep()
        if at_once or not (self._reading or self.loops.end()):
            self.stop()
        if self.whole_run is not None and self.whole_run.feeding:
            self.whole_run.others(steps)
            return
        self._drain()
        self.loops.stepped()
        self._bring_forward()

    def _bring_forward(self) -> None:
        """Bring forward what the training loop does every so many steps."""
        if not self._brought:
            self._brought = self._periods.due = True
            self._conditions = later_conditions(sys._getframe(1))
            bring_forward(sys._getframe(1))

    def _drain(self) -> None:
        self.later.trained_on(self._reading)
        self.loops.ran_dry()
        self.draining = self.state.answers.finishing = True
        self._deadline = Deadline(_SECONDS_AFTER, cpu_time=True)
        self.state.on_real_op = self._watch_time
        self._waits.look(self._watch_time, _SECONDS_AFTER)

    def model_runs(self, model: torch.nn.Module, *, training: bool) -> None:
        """To be called for a root module that allocates on the device or has memory there."""
        self.step_batches.model_runs(training=training)
        self._calls += training
        if training:
            self.needs.forward(model)
        if not self.draining:
            return
        self.loops.leave()
        if not training:
            self._evaluated = True
        elif not self._evaluated:
            if not self._left.noted:  # else its loader is read to its end
                self._forwards_left -= 1 / self._most_calls
            if self._forwards_left < 0 and not self._reads_on():
                self.stop()
        self._watch_time()

    def _before_backward(self, *_call: Any, **_keywords: Any) -> AbstractContextManager[object]:
        """Backward on another loader's batch is training; code that only runs forward may be an
        evaluation that keeps its gradients."""
        self.state.recorder.flush()
        step = self.state.recorder.builder.step
        self.step_batches.backward(step, self.state.copies_from_host)
        self.loops.backward(step)
        self.needs.backward()
        if not self.draining:
            self._most_calls, self._calls = max(self._most_calls, self._calls), 0
            self.needs.note()
        elif self.loops.used:
            self.loops.leave()
            if self.loops.passed and self.needs.are_more:
                self._train_on()
            elif not self.loops.trains_again():
                self.stop()
            self._forwards_left = _FORWARDS_AHEAD
        elif self._opened_another and self.needs.are_more:
            self._train_on()
        elif self._opened_another and not self._evaluated:
            self._train_no_more()
        return nullcontext()

    def _reads_on(self) -> bool:
        """Whether it trains on in a loop with an endless reader, which is told to end."""
        reads_on = self.loops.end_reading()
        if reads_on and self.whole_run:
            self.whole_run.trains()
        return reads_on

    def _train_no_more(self) -> None:
        """Another epoch has begun, like those before: let the script go through the rest."""
        if self._reads_on():
            return
        if not self._opened_another:
            self.stop()
        if not self.later.begun:
            self.later.begin()
            if self.whole_run is not None:
                self.whole_run.trains()  # what it gives to compare needs no more
            self._dry.update(self._batches)
            # The step of this backward pass has yet to come.
            self._steps_left, self._forwards_left = 1 + _STEPS_AHEAD, _FORWARDS_AHEAD

    def _train_on(self) -> None:
        """Follow a training that needs more memory than what was seen until its end."""
        if self._trainings == _MOST_TRAININGS:
            self.state.assumptions.add(
                "trainings",
                f"the job trained {self._trainings} times over, with more memory or other "
                "optimizers; what it trains after that may need more: --steps N",
            )
            self.stop()
        self._trainings += 1
        self.loops.go_on()
        self._periods.due = False
        self.draining = self.state.answers.finishing = False
        if self.whole_run is not None:
            self.whole_run.trains()
        self._deadline, self.state.on_real_op = None, None
        self.later.end()
        self._batches.clear()
        self._nothing_seen()
        self.another_training()

    def another_kind(self) -> None:
        """To be called before the first step of an optimizer of another kind than those before: the
        loop around it may have been told to end, because its training needed no more so far."""
        if self.draining and self.loops.used:
            self._train_on()

    def after_step(self) -> None:
        """To be called when an optimizer stepped although enough was seen."""
        if not self.draining:
            if self.whole_run is not None and self.whole_run.all_run:
                self._drain()
                self._bring_forward()
            return
        if self.whole_run is not None:
            self._bring_forward()
        if self.loops.used:
            self.loops.stepped()
            return
        if not self.later.begun and (self._evaluated or self._opened_another):
            self._train_no_more()
            return
        self._steps_left -= 1
        if self._steps_left < 0 and not self._reads_on():
            self.stop()

    def _watch_time(self) -> None:
        """Bound the time that the host computes after the epoch, as for merging weights."""
        if self._deadline is not None and self._deadline.passed:
            self.stop()

    def stop(self) -> None:
        """Raise EnoughSeen here, and at every operator that the script may still try."""
        self._left.say()
        self.state.recorder.flush()
        self.state.recorder.finished = True
        raise EnoughSeen

    def cut_off(self) -> None:
        """Note that the script failed in an epoch without batches: the rest was not seen."""
        self.state.recorder.finished = True

    def _allow(self, loader: Any) -> None:
        """Raise StopIteration for a loader that has given enough."""
        if self._is_another(loader):
            self._opened_another = True
            self._batches[loader] = self._batches.get(loader, 0) + 1
            kept = self._left.before(loader)
            if kept >= MORE and self._batches[loader] > _BATCHES_AFTER:
                self._left.note(kept, self._batches[loader] - 1)
            if kept >= MORE or self._batches[loader] <= _BATCHES_AFTER:
                return
        if not expects_no_end():
            raise StopIteration

    def _is_another(self, loader: Any) -> bool:
        """Whether a loader was not being read when all ran dry."""
        if loader in self._reading and loader not in self._batches:
            self._reading.discard(loader)
            self._dry.add(loader)
            if self.whole_run is not None and not expects_no_end():
                self.whole_run.ran_dry(loader)
        return loader not in self._dry

    def _forget(self, loader: Any) -> None:
        self._reading.discard(loader)
        self._dry.discard(loader)
        self._batches.pop(loader, None)

    @property
    def batches(self) -> list[Batches]:
        return self.whole_run.batches if self.whole_run is not None else []

    def close(self) -> None:
        self._waits.end()
        if self.whole_run is not None:
            self.whole_run.end()

    def notes(self) -> list[str]:
        """Notes about loaders that were read ahead, and about one that was not read but has batches
        larger than all seen."""
        ahead = [*self.whole_run.notes] if self.whole_run is not None else []
        if several := ", ".join(dict.fromkeys((*self._conditions, *self._periods.unseen()))):
            ahead.append(f"later steps may do other things, which were not seen: {several}")
        return [*ahead, *self._sizes.notes()]

    @property
    def reads_some(self) -> bool:
        """Whether loaders were read, and only as far as steps differed."""
        return self.whole_run is None and self._sizes.any_read

    @property
    def saw_evaluation(self) -> bool:
        """Whether anything ran without gradients on another loader since loaders ran dry, or after
        a loop without one."""
        return self._evaluated and (self._opened_another or self.loops.used)
