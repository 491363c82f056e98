"""Follows optimizer steps: where they begin and end, what they allocate, when to stop."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from memplan.types.deadline import Deadline
from memplan.types.trace import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memplan.capturing.patches.attributes import Patches
    from memplan.capturing.patches.job_observer import JobObserver, Step
    from memplan.capturing.state import CaptureState
    from memplan.capturing.training.ending import Ending


DEFAULT_MAX_STEPS = 16
_LONG_STEP = 20_000
"""A step of so many events need not run a third time if the second is like the first."""
_PATIENCE_SECONDS = 60.0
"""After this long, fewer steps suffice."""
_STATE_STEPS = 2
"""Steps before a steady one: the first creates the optimizer state, the second is compared."""
_WORTH_SAYING = 1 << 20
"""Parameters without a gradient are reported from so many bytes on."""
_LONGEST_ROUND = 5
"""The most steps of one optimizer for one of another: five of a critic for a generator's."""
_MOST_OTHERS = 16
"""So many steps of one optimizer after the last of another, which has trained something else, mean
that the other is done."""


class StepWatcher:
    """Follows calls of `Optimizer.step`.

    A step is everything between the ends of two calls of the first optimizer that stepped, or of
    the next one once that steps no more. It is steady if it asked for the same bytes on the same
    streams in the same order as the step before, and released them in any order. Or the last few
    steps did so as the few before them, because another optimizer may step every other time. The
    first step creates the optimizer's state and differs from all others, so three steps are needed.
    For a long step (many micro-batches) two suffice, if the passes of both asked for the same
    memory and left as much alive.
    """

    def __init__(self, state: CaptureState, max_steps: int | None, ending: Ending | None) -> None:
        self.state = state
        self.max_steps = max_steps
        self.ending = ending
        self.enough = False
        self.completed = 0
        self.steady = False
        self.stop_reason = ""
        self._deadline = Deadline(_PATIENCE_SECONDS, cpu_time=True)
        self._made: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._any_made = False
        self._stepped: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """How often each optimizer has stepped, also inside another one that wraps it."""
        self._kinds: set[type] = set()
        """Classes of the optimizers that have stepped."""
        self._updated: set[int] = set()
        """Parameters that had a gradient when an optimizer stepped."""
        self._first: int | None = None
        """The optimizer whose steps count."""
        self._others: Counter[int] = Counter()
        """Steps of each other optimizer since."""
        self._start = 0
        self._passes: tuple[int, int] | None = None
        """The events of the forward and backward passes of the current step, as far as known."""
        self._earlier_passes: tuple[int, int] | None = None
        self._last_round: tuple[int, int] | None = None
        self._history: deque[tuple[bytes, int]] = deque(maxlen=2 * _LONGEST_ROUND + 1)
        """For each of the last steps a digest of its requests, and the bytes alive at its end."""
        self._round = 0
        """The last so many steps repeat those before them; 0 while they do not."""
        self._kept = 0
        self._grew_in = 0
        self._most_trained = 0
        """The most bytes of parameters of an optimizer that has stepped."""
        self._before_this = 0
        """Steps of the trainings before this one."""
        if ending is not None:
            ending.another_training = self._another_training
            ending.needs.optimizer_grows = self._optimizer_grows
            ending.optimizer_is_new = lambda: any(one not in self._stepped for one in self._made)

    def _another_training(self) -> None:
        self.enough = self.steady = False
        self.stop_reason, self._first = "", None
        self._before_this = self.completed
        self._history.clear()
        self._deadline = Deadline(_PATIENCE_SECONDS, cpu_time=True)

    def _optimizer_grows(self) -> int:
        return max(map(self._trained_bytes, self._made), default=0) - self._most_trained

    def _trained_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter in _parameters(optimizer)
            if parameter.requires_grad and parameter.device.type == self.state.device_type
        )

    def install(self, patches: Patches, observer: JobObserver) -> None:
        """Follow optimizers until the patches are undone and the observer is closed."""
        real_init: Any = torch.optim.Optimizer.__init__

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            real_init(optimizer, *args, **kwargs)
            self._made.add(optimizer)
            self._any_made = True

        patches.set(torch.optim.Optimizer, "__init__", init)
        observer.on_steps(self._before, self._after)

    def _before(self, step: Step) -> None:
        if self.ending is not None and type(step.optimizer) not in self._kinds:
            self.ending.another_kind()
        self._updated |= step.updated
        self.state.context.in_optimizer = step.within  # of one that failed no end was told
        counts = not step.within and self._first in (None, id(step.optimizer))
        if counts and self._passes is not None:
            self.state.recorder.flush()
            self._passes = self._passes[0], len(self.state.recorder.builder)
        self.state.context.in_optimizer += 1
        self._see_gradients(step.optimizer)
        for parameter in _parameters(step.optimizer):
            self.state.role_of(parameter, Role.PARAMETER)

    def _see_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                self._updated.add(id(parameter))
                self.state.role_of(parameter.grad, Role.GRADIENT)

    def _after(self, step: Step) -> None:
        optimizer = step.optimizer
        self.state.context.in_optimizer = step.within
        if step.closure:  # it has run the backward pass
            self._see_gradients(optimizer)
        self._most_trained = max(self._most_trained, self._trained_bytes(optimizer))
        self._stepped[optimizer] = self._stepped.get(optimizer, 0) + 1
        self._kinds.add(type(optimizer))
        kept = 0
        for state in optimizer.state.values():
            for tensor in _tensors(state):
                kept += 1
                self.state.role_of(tensor, Role.OPTIMIZER_STATE)
        if kept > self._kept:
            self._kept, self._grew_in = kept, self.completed + 1
        if step.within:
            return
        if self._stepped[optimizer] == 1 and not self.state.context.backward_seen:
            return
        self._others[id(optimizer)] += 1
        self.state.answers.new_step()
        if self._first is None or self._others[id(optimizer)] > _MOST_OTHERS:
            self._first = id(optimizer)
        if id(optimizer) == self._first:
            self._others.clear()
            self._complete()

    @property
    def has_optimizers(self) -> bool:
        """Whether the job has created an optimizer of PyTorch's: then only its steps count."""
        return self._first is not None or self._any_made

    def updated_by_hand(self, after: int) -> None:
        """The script has updated weights itself, before operator `after`: a step ended there. The
        forward pass of the next one may have run since."""
        end = self.state.recorder.builder.begin_step(self.completed + 1, after)
        if self._passes is not None:
            self._passes = self._passes[0], end
        self._complete(end)
        self._passes = end, end

    def forward(self, begun: int) -> None:
        """A model runs with gradients since event `begun`."""
        if self._passes is None and not self.state.context.in_optimizer:
            self._passes = begun, begun

    def replayed(self) -> None:
        """A CUDA graph that contains an optimizer step ran again."""
        self._complete()

    def _complete(self, end: int | None = None) -> None:
        """A step ended before event `end`; None: here."""
        recorder = self.state.recorder
        recorder.flush()
        self.completed += 1
        recorder.builder.step = self.completed
        self.state.answers.new_step()
        end = len(recorder.builder) if end is None else end
        requests = recorder.builder.requests_of_step(self._start, end)
        self._history.append((blake2b(requests).digest(), recorder.live_bytes))
        self._round = self._steps_that_repeat()
        self.steady = self._round > 0 and (
            self.completed > _STATE_STEPS
            or end - self._start >= _LONG_STEP
            or self._deadline.passed
        )
        if self._round and not self.enough:
            self._last_round = self.completed - self._round, self.completed
        self._start = end
        self._earlier_passes, self._passes = self._passes, None
        if self.ending is None:
            self.state.answers.finishing = self.steady or self._out_of_patience()
            return
        steps = self.completed - self._before_this
        if steps <= _STATE_STEPS:
            self.ending.look_ahead(self.completed, last=steps == _STATE_STEPS)
        if self.enough:
            self.ending.after_step()
        elif self._seen_enough():
            self.enough = True
            self.ending.begin(at_once=self.max_steps is not None, steps=self.completed)

    def _steps_that_repeat(self) -> int:
        """Number of steps after which steps repeat: more than one where a loop has a second
        optimizer that steps less often."""
        if self.completed == _STATE_STEPS:
            return int(self._second_is_like_the_first())
        seen = [digest for digest, _ in self._history]
        for count in range(1, _LONGEST_ROUND + 1):
            first = self.completed - 2 * count  # the very first step is like no other
            if first > 0 and seen[-count:] == seen[-2 * count : -count]:
                return count
        return 0

    def _second_is_like_the_first(self) -> bool:
        """Whether the passes of the second step asked for the same memory as those of the first,
        except for what the first allocated for good (gradients that are zeroed in place, a gradient
        scaler's tensors, library workspaces), and whether as much was alive at the end."""
        (_, before), (_, after) = self._history
        first, second = self._earlier_passes, self._passes
        if first is None or second is None or before != after:
            return False
        builder = self.state.recorder.builder
        return builder.allocations(*second) == builder.allocations(*first, gone_by=len(builder))

    def _waiting(self) -> int:
        """Number of parameters on the device of optimizers that have not stepped twice. The first
        step creates the state, and the second runs beside it. Parameters that another optimizer
        updates do not count."""
        late = [one for one in self._made if self._stepped.get(one, 0) < _STATE_STEPS]
        if not late:
            return 0
        updated = {
            id(parameter)
            for one, times in self._stepped.items()
            if times >= _STATE_STEPS
            for parameter in _parameters(one)
        }
        return sum(
            parameter.requires_grad
            and parameter.device.type == self.state.device_type
            and id(parameter) not in updated
            for one in late
            for parameter in _parameters(one)
        )

    def _without_gradient(self) -> tuple[int, int]:
        """Number and bytes of parameters on the device that never had a gradient when their
        optimizer stepped: later they may have gradients and state."""
        found = {
            id(parameter): parameter.numel() * parameter.element_size()
            for one in self._stepped
            for parameter in _parameters(one)
            if parameter.requires_grad
            and parameter.device.type == self.state.device_type
            and id(parameter) not in self._updated
            and not one.state.get(parameter)
        }
        return len(found), sum(found.values())

    def _growth(self) -> int:
        """Bytes that each step of the last round kept."""
        alive = [nbytes for _, nbytes in self._history]
        return (alive[-1] - alive[-1 - self._round]) // self._round

    def _seen_enough(self) -> bool:
        """Whether more steps would show nothing new; `stop_reason` says why."""
        if self.max_steps is not None:
            if self.completed < self.max_steps:
                return False
            self.stop_reason = f"stopped after {self.completed} optimizer steps, as asked"
        elif self._out_of_patience() or (
            self.steady and self._on_default_stream() and not self._waiting()
        ):
            self._say_why()
        else:
            return False
        return True

    def _say_why(self) -> None:
        waiting = self._waiting()
        if waiting:
            self.state.assumptions.add(
                "optimizer",
                f"an optimizer of {waiting} parameters did not step twice in the first "
                f"{self.completed} steps; a step that it takes later may need more: --steps N",
            )
        count, nbytes = self._without_gradient()
        if nbytes >= _WORTH_SAYING:
            self.state.assumptions.add(
                "optimizer",
                f"{count} parameters of the optimizer ({nbytes:,} bytes) had no gradient in the "
                f"first {self.completed} steps; once they have, it and their state need more: "
                "--steps N",
            )
        if self.steady:
            count, growth = self._round, self._growth()
            alike = (
                "last asked for the same memory as the step before"
                if count == 1
                else f"last {count} asked for the same memory as the {count} before"
            )
            self.stop_reason = (
                f"stopped after {self.completed} optimizer steps (0 to {self.completed - 1}): the "
                f"{alike}"
            )
            if growth > 0:
                self.state.assumptions.add(
                    "growth",
                    f"every step keeps {growth:,} bytes more than it frees (tensors kept in a "
                    "list?), and a longer run needs more: --steps N",
                )
        else:
            self.stop_reason = (
                f"stopped after {self.completed} optimizer steps, the last unlike those before"
            )
            self.state.assumptions.add(
                "steady-step",
                f"the last of the first {self.completed} steps was not like those before it "
                "(batches of different shapes?); a later step may need more: raise --steps to see "
                "more",
            )

    @property
    def repeats(self) -> tuple[int, int] | None:
        """The first, and one past the last, of the steps that a longer run is assumed to repeat;
        None where none are known, or the job ended by itself."""
        return self._last_round if self.enough or self.ending is None else None

    def _on_default_stream(self) -> bool:
        """Whether this is the job proper. Before a CUDA graph is captured, three or more steps run
        on another stream, and would look steady."""
        return self.state.context.outer_stream == 0

    def notes(self) -> list[str]:
        """Notes about the steps that were seen."""
        if self.enough and self.max_steps is None:
            seen = self.ending is not None and self.ending.saw_evaluation
            later = [] if seen else ["an evaluation in mid-epoch"]
            if self.ending is not None and self.ending.reads_some:
                later.append("larger batches, which --whole-run looks for")
            later.append("layers unfrozen")
            if self.ending is not None and self.ending.loops.skipped:
                later.append("further turns of the loops around the training")
            if self.ending is not None and self.ending.loops.left_a_call:
                later.append("what an installed package's training does at its end")
            if self.state.recorder.finished:
                later.append("what the script does after the training")
            return [
                "the rest of the run is taken to be like these steps; what happens later "
                f"({', '.join(later)}) was not seen: --steps N shows more",
                *(self.ending.notes() if self.ending is not None else ()),
            ]
        if not self.enough and 0 < self.completed <= _STATE_STEPS:
            return [f"the job ended by itself after {self.completed} optimizer step(s)"]
        if self.only_gradients:
            return [
                "no optimizer was made and no update of weights was seen: the answer is for the "
                "backward passes that ran"
            ]
        return []

    @property
    def only_gradients(self) -> bool:
        """Whether the job computes gradients for something else than an optimizer of PyTorch's."""
        steps = self.has_optimizers or self.completed
        return not steps and self.state.context.backward_seen

    def _out_of_patience(self) -> bool:
        # The state grows step by step where it is a history (L-BFGS).
        enough = max(self._before_this + DEFAULT_MAX_STEPS, self._grew_in + _STATE_STEPS)
        steps = self.completed - self._before_this
        return self.completed >= enough or (self._deadline.passed and steps > _STATE_STEPS)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer keeps for a parameter, also those in lists (L-BFGS)."""
    for value in state.values() if isinstance(state, dict) else ():
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class HandUpdates:
    """Finds updates of weights by a script itself, without an optimizer of PyTorch's.

    An update has happened if a forward pass reads values that were computed from the gradients of
    the backward pass before it, whatever the script did in between: in place on `p.data` or under
    `no_grad`, by multi-tensor operators, or by creating new weights. This is checked where the next
    backward pass begins, among the operators recorded since the last one; the step ended after the
    last operator of the update. In a job with an optimizer of PyTorch's, only the optimizer's steps
    count and nothing is checked: gradients of gradients and accumulated ones would look like
    updates.
    """

    def __init__(self, state: CaptureState, steps: StepWatcher) -> None:
        self._state = state
        self._steps = steps
        self._since: int | None = None
        """The first operator of the last backward pass; None before any."""

    def around_backward(self, *_call: Any, **_keywords: Any) -> AbstractContextManager[object]:
        """A context manager for a `JobObserver`."""
        if torch._C._current_graph_task_id() == -1:  # not of a checkpoint within another
            self.look(at_end=False)
            self._since = self._state.recorder.builder.ops
        return nullcontext()

    def look(self, *, at_end: bool) -> None:
        """End a step where weights were updated since the last backward pass. `at_end`: no forward
        pass will read them, so it is enough that older memory was written."""
        if self._since is None or self._steps.has_optimizers:
            return
        # Without modules nothing tells a forward pass from what is around it.
        in_place = at_end or not self._state.context.module_seen
        self._state.recorder.flush()
        after = self._state.recorder.builder.updated_by_hand(self._since, in_place=in_place)
        if after is not None:
            self._since = None
            self._steps.updated_by_hand(after)
