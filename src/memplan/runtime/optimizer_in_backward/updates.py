"""The optimizer in backward: weights are updated in the backward pass, parameter by parameter.

A parameter is updated by the optimizer's own code in a hook that fires when its gradient is
complete (`Tensor.register_post_accumulate_grad_hook`), and the gradient is released; the
optimizer's step then finds nothing left to do. In the literature this is fused backward or LOMO
(Lv et al., 2023); memplan does it only where every number stays the same bit for bit.

The first step is watched: its updates come at the optimizer's step, and every operator between the
completion of a gradient and that step is looked at. What would see a difference (clipping, a
scaler, accumulation, a closure, a schedule that steps in between, several ranks …) ends it there.
Later steps are checked before anything is updated. What a job then does for the first time after
an update, and what cannot be undone, raises OptimizerInBackwardError before it can use a wrong
value.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.job_observer import JobObserver, Step
from memplan.runtime.optimizer_in_backward.applied_gradient import too_late
from memplan.runtime.optimizer_in_backward.clipping import Clipping
from memplan.runtime.optimizer_in_backward.followed import Followed, Parameter
from memplan.runtime.optimizer_in_backward.preconditions import (
    in_autocast,
    reads_gradients,
    why_not_now,
    why_not_placed,
    why_not_this,
)
from memplan.runtime.optimizer_in_backward.saved_weights import touches, used_late
from memplan.runtime.optimizer_in_backward.watched import (
    Guard,
    InBackward,
    Watch,
    fast_attention,
    leave_idle,
    unseen,
)
from memplan.runtime.tape.settings import tensors_are_fake
from memplan.types.plan import OrderPart
from memplan.types.run_outcome import EarlyUpdates


class OptimizerInBackward:
    """A context manager for the optimizers that are created while it is entered."""

    def __init__(
        self,
        part: OrderPart,
        on_note: Callable[[str], None] | None = None,
        *,
        same_job: bool = True,
        exact: bool = True,
        on_clip: Callable[[float], None] | None = None,
    ) -> None:
        """`on_note` is told, in a sentence, why the updates come as they would without a plan.
        `same_job`: the plan's capture has shown that nothing uses gradients after the optimizer's
        step. Else the gradients of the first step are kept, to see it here. `exact`: False where
        another part of the plan updates weights in another way than the optimizer does.
        `on_clip` is told to what a capture clips gradients by value."""
        self.account = EarlyUpdates(planned=part.parameters)
        self._passes = 0
        self._numbers = (
            "This changes no number"
            if exact
            else "With state in 8 bits, numbers differ from a run without the plan in any case"
        )
        self._same_job = same_job
        self._from_first = part.from_first and same_job
        self._clipping = Clipping(part, on_clip)
        self._made_state = False
        """Whether the first update of a parameter was in this backward pass."""
        self._on_note = on_note
        self._off = False
        self._in_backward = False
        self._watch: Watch | None = None
        self._armed = False
        """The first step has shown nothing that updates in backward would change."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._followed: weakref.WeakKeyDictionary[Optimizer, Followed] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped since the backward pass that is watched."""
        self._pending: list[Parameter] = []
        """Updated, and their optimizer's step has not come yet."""
        self._guard: Guard | None = None
        self._sums_late = ""
        """What changes gradients after they are complete."""
        self._observer = JobObserver(alters_steps=True)
        self._patches = Patches()

    def __enter__(self) -> OptimizerInBackward:
        self._thread = threading.get_ident()
        self._modes = _get_current_dispatch_mode_stack()
        self._observer.on_backward(self._around_backward)
        self._observer.on_steps(self._before_step, self._after_step)
        add: Any = Optimizer.add_param_group

        @functools.wraps(add)
        def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            add(optimizer, param_group)
            self._group_added(optimizer)

        self._patches.set(Optimizer, "add_param_group", add_param_group)
        init: Any = DistributedDataParallel.__init__

        @functools.wraps(init)
        def ddp(module: Any, *args: Any, **kwargs: Any) -> None:
            self._sums_late = "DistributedDataParallel sums gradients over ranks in buckets"
            init(module, *args, **kwargs)

        self._patches.set(DistributedDataParallel, "__init__", ddp)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._observer.close()
        self._patches.undo()
        if self._passes > 1 and not self.account.steps and not self._off:
            self._give_up(
                "no two steps had the same optimizers, and weights in the same memory"
                if self._watch is not None
                else "no optimizer was made to train them (copied or unpickled ones are not seen)"
            )
        self._stop()
        if self._guard is not None:
            self._guard.close()
        leave_idle()

    def _stop(self) -> None:
        """No more updates in backward passes to come."""
        self._off = True
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for followed in self._followed.values():
            followed.close()
        self._followed.clear()

    def _give_up(self, reason: str) -> None:
        self._stop()
        self.account.ended = reason
        if self._on_note is not None:
            text = f"weights are updated by the optimizer's step, as without a plan: {reason}"
            if not tensors_are_fake():  # a capture has no numbers, and shows the peak itself
                text += f". {self._numbers}; the peak may be higher than the plan promises"
            self._on_note(text)

    # Optimizers that are made or changed

    def _group_added(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._armed = False

    def _training(self) -> list[Optimizer]:
        """Optimizers with something to train."""
        return [
            optimizer
            for optimizer in self._optimizers
            if any(t.requires_grad for g in optimizer.param_groups for t in g["params"])
        ]

    # The backward pass

    def _around_backward(
        self, tensors: Any, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[object]:
        if torch._C._current_graph_task_id() != -1:
            return self._around_nested(tensors)
        if not kwargs.get("accumulate_grad"):
            return nullcontext()
        if threading.get_ident() != self._thread:
            self._elsewhere(tensors)
            return nullcontext()
        leave_idle()
        self._passes += 1
        if not self._off:
            self._begin(tensors, why_not_this(*args))
        return nullcontext() if self._off or not self._followed else self._updating()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        try:
            self._in_backward = True
            with InBackward(self._seer), fast_attention():
                yield
        finally:
            self._in_backward = False
            self._end()

    def _around_nested(self, tensors: Any) -> AbstractContextManager[object]:
        """Within another backward pass, on a GPU in a thread of autograd: a checkpoint of the old
        kind, or a function with a backward of its own."""
        if not self._in_backward:
            return nullcontext()
        if kind := used_late(tensors, self._tensors()):
            self._seer.found(f"{kind} in a backward pass within another may use a parameter late")
        return InBackward(self._seer)  # PyTorch has left it

    @property
    def _seer(self) -> Watch | Guard:
        seer = self._watch or self._guard
        assert seer is not None, "one of them belongs to every backward pass"
        return seer

    def _elsewhere(self, tensors: Any) -> None:
        """A backward pass begins in another thread."""
        known = (t for o in self._training() for g in o.param_groups for t in g["params"])
        if self._off or not touches(tensors, known):
            return
        if self._pending or (self._in_backward and self._watch is None):
            raise too_late("a backward pass in another thread needs a value")
        self._give_up("the backward pass runs in another thread than the program began in")

    def _begin(self, tensors: Any, reason: str) -> None:
        """`reason`: why, going by what the pass is asked for, nothing may be updated."""
        if self._pending:
            raise too_late("another backward pass begins before optimizer.step() and needs a value")
        if self._watch is not None:
            self._end_watch()
        if self._off:
            return
        if any(one.tensor.grad is one.applied is not None for one in self._all()):
            raise too_late("a backward pass adds to a gradient")
        reason = reason or self._sums_late or self._clipping.why_not()
        if reason := reason or why_not_now(self._modes, watched=not self._from_first):
            self._give_up(reason)
        elif self._armed and not any(f.changed for f in self._followed.values()):
            self._begin_followed()
        else:
            self._begin_watch()
        if self._off or not self._followed:
            return
        self._made_state = False
        if kind := used_late(tensors, self._tensors()):
            self._give_up(f"{kind} may use a parameter after its gradient is complete")
        elif self._watch is None:
            self._guard = Guard()

    def _tensors(self) -> list[torch.Tensor]:
        return [one.tensor for one in self._all()]

    def _all(self) -> list[Parameter]:
        return [one for followed in self._followed.values() for one in followed.parameters]

    def _begin_followed(self) -> None:
        moved = False
        for followed in self._followed.values():
            followed.begin()
            moved |= followed.moved()
        reasons = (followed.why_not() for followed in self._followed.values())
        reason = next(filter(None, reasons), "")
        if reason := reason or (why_not_placed(list(self._followed)) if moved else ""):
            self._give_up(reason)

    def _begin_watch(self) -> None:
        self._armed = False
        for followed in self._followed.values():
            followed.close()
        self._followed.clear()
        for optimizer in self._training():
            self._followed[optimizer] = Followed(optimizer, self._is_ready, self._as_a_whole)
        if reason := why_not_placed(list(self._followed)):
            self._give_up(reason)
        else:
            self._begin_followed()
        if self._followed and not self._off:
            self._stepped.clear()
            if self._from_first and not reads_gradients():
                self._armed = True
            else:
                self._watch = Watch()

    def _end_watch(self) -> None:
        """The backward pass after the one that was watched begins."""
        assert self._watch is not None
        missing = len(self._followed) - len(self._stepped)
        if not self._followed:  # the optimizers are gone
            self._watch.close()
            self._watch = None
        elif not self._stepped:
            self._give_up(
                "a backward pass is not followed by the optimizer's step (gradients are "
                "accumulated, or steps are skipped)"
            )
        elif self._watch.finding or missing:
            self._give_up(self._watch.finding or f"{missing} more optimizer(s) step at other times")
        else:
            self._arm()

    def _arm(self) -> None:
        assert self._watch is not None
        self._watch.close()
        self._watch = None
        self._armed = True

    def _is_ready(self, one: Parameter) -> None:
        """A gradient is complete; called by the engine, on a GPU in a thread of its own."""
        if not self._in_backward:
            return
        with unseen():
            tensor = one.tensor
            if self._watch is not None:
                assert tensor.grad is not None
                one.gradient_is_complete(tensor.grad)
                self._watch.is_ready(tensor, tensor.grad, one.state)
                return
            if one.updated:
                raise too_late("a second part comes for a gradient")
            new = one.is_new() and not self._from_first
            if new or torch.is_autocast_enabled(tensor.device.type):
                return
            if one.may_be_updated():
                assert self._guard is not None
                self._pending.append(one)
                self._made_state |= not one.state
                one.update(self._clipping.bound)
                self._guard.add([tensor, *one.state])

    def _end(self) -> None:
        """It is over, by whatever way: until the optimizer's step nothing may use what has been
        updated."""
        if self._watch is not None:
            self._watch.open()
        if not self._pending or self._guard is None:
            self._guard = None
            return
        self._guard.open()
        account, now = self.account, len(self._pending)
        account.steps += 1
        account.parameters = max(account.parameters, now)
        if account.steps == 1 and now < account.planned and self._on_note is not None:
            self._on_note(
                f"{now} of the {account.planned} parameters that the plan updates in backward "
                f"were: was it made for other arguments? {self._numbers}; the "
                "peak may be higher than the plan promises"
            )

    # The optimizer's step

    def _before_step(self, step: Step) -> None:
        if self._pending:
            self._hand_over(step.optimizer, closure=step.closure)
        elif step.closure and not self._off:  # the backward pass may be in it
            self._give_up("the optimizer's step is given a closure")
        elif self._watch is not None:
            self._judge(step.optimizer)

    def _hand_over(self, optimizer: Optimizer, *, closure: bool) -> None:
        """The step finds no gradients where the update has been made."""
        if closure:
            raise too_late("optimizer.step() is given a closure and asks for a gradient")
        followed = self._followed.get(optimizer)
        if followed is None:
            raise too_late("another optimizer steps and may ask for a gradient")
        if self._made_state and torch._C._len_torch_function_stack():
            raise too_late(
                "optimizer.step() makes its state under a default device or another mode"
            )
        if followed.changed or followed.settings_changed() or in_autocast():
            raise too_late("groups, hyperparameters or autocast change before optimizer.step()")
        mine = [one for one in self._pending if one.optimizer() is optimizer]
        for one in mine:
            if one.tensor.grad is not one.applied:
                raise too_late("something replaces a gradient")
            if not one.is_as_left():
                raise too_late("something replaces a value or the optimizer's state")
        self._clipping.check(one.applied for one in mine)
        for one in mine:
            one.tensor.grad = None
        self._pending = [one for one in self._pending if one.optimizer() is not optimizer]
        assert self._guard is not None
        self._guard.forget([tensor for one in mine for tensor in (one.tensor, *one.state)])
        if not self._pending:
            self._guard.close()
            self._guard = None

    def _as_a_whole(self, function: str) -> None:
        """The optimizer's state is saved or loaded."""
        if self._pending:
            raise too_late(f"{function}() of the optimizer comes before its step and uses a value")
        if self._watch is not None and len(self._stepped) < len(self._followed):
            self._watch.found(f"{function}() of the optimizer is called before its step")

    def _judge(self, optimizer: Optimizer) -> None:
        """The first step: whether the next updates may be in backward. Where it is the only
        optimizer, this one is made parameter by parameter too, for the least memory from the
        beginning."""
        assert self._watch is not None
        followed = self._followed.get(optimizer)
        if followed is None:
            return self._give_up("an optimizer steps that was not there before")
        reason = self._why_not_in_backward(optimizer, followed)
        if reason:
            return self._give_up(reason)
        self._stepped.add(optimizer)
        self._watch.paused += 1
        if self._releases_first:
            for one in list(followed.with_gradient()):
                one.update()
                one.tensor.grad = None
        return None

    @property
    def _releases_first(self) -> bool:
        return self._same_job and len(self._followed) == 1

    def _why_not_in_backward(self, optimizer: Optimizer, followed: Followed) -> str:
        assert self._watch is not None
        if optimizer in self._stepped:
            return "the optimizer steps twice"
        if reason := self._watch.finding or followed.irregular():
            return reason
        if in_autocast():
            return "the optimizer steps under autocast"
        where = reads_gradients()
        return f"{where} reads gradients" if where else ""

    def _after_step(self, step: Step) -> None:
        followed = self._followed.get(step.optimizer)
        if self._off or followed is None:
            return
        for one in followed.parameters:
            if one.updated and one.tensor.grad is None:
                one.tensor.grad = one.applied
        if self._watch is None or not self._watch.paused:
            return
        self._watch.paused -= 1
        for one in followed.parameters:
            self._watch.forget(one.tensor, one.state)
        if self._releases_first:
            self._arm()
