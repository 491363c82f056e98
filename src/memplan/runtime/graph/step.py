"""`memplan.compile`: a training step, run as one graph in the order that needs the least memory."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, ParamSpec

import torch
from torch._dynamo.exc import Unsupported
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from memplan.capturing.patches.job_observer import tell_step
from memplan.runtime.graph.compile import Options
from memplan.runtime.graph.extra_guards import (
    autocast_cache_persists,
    has_saved_tensor_hooks,
    missing_guards,
    strict,
)
from memplan.runtime.graph.joint import check_loss
from memplan.runtime.graph.leaf_hooks import LeafHooks
from memplan.runtime.graph.report import CompileReport, ProgramReport
from memplan.runtime.graph.setup import Setup
from memplan.runtime.graph.step_capture import (
    StepCapture,
    no_gradient,
    wraps_several_tensors,
)
from memplan.runtime.graph.updates import Updates
from memplan.types.errors import MemplanError, UsageError, first_line

log = logging.getLogger("memplan")

P = ParamSpec("P")

_one_at_a_time = threading.RLock()
"""Only one call runs at a time, also of different steps: while it captures, PyTorch's compiler is
patched for all threads (`strict`)."""


@dataclass(frozen=True)
class _Before:
    """The state before a call, to find out and undo what the call changed."""

    generators: list[tuple[torch.Generator, torch.Generator]]
    """Each generator, with a copy."""
    versions: list[tuple[torch.Tensor, int]]
    """Each parameter, with its version (`Tensor._version`), which inference tensors do not have."""


class CompiledStep(Generic[P]):
    """A step made by `memplan.compile`. Call it with a batch; `report()` says what it does."""

    def __init__(
        self,
        loss_fn: Callable[P, torch.Tensor],
        optimizers: tuple[torch.optim.Optimizer, ...],
        scaler: torch.amp.GradScaler | None,
        options: Options,
    ) -> None:
        # A loss function may be an object, whose attributes must not replace the step's own.
        functools.update_wrapper(self, loss_fn, updated=())
        self.__name__: str = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._loss_fn = loss_fn
        self._scaler = scaler
        self._options = options
        self._updates = Updates(optimizers)
        self._updates.keep_gradients = options.keep_gradients
        self._leaf_hooks = LeafHooks()
        self._updates.chunked = options.codegen == "inductor"
        self._past: list[ProgramReport] = []
        """Reports of graphs that are never run again."""
        self._micro = 0
        """Calls so far that accumulate gradients for the next update."""
        self._plain_calls = 0
        self._warned = False
        """Whether a warning has said that nothing is trained."""
        self._fallback = missing_guards()
        self._captures = 0
        """How often everything was captured anew because of something that no guard compares."""
        self._setup = Setup(self._updates, scaler, options)
        self._capture = StepCapture(loss_fn, self._setup)
        if self._fallback:
            log.warning("memplan: %s runs plainly: %s", self.__name__, self._fallback)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        with _one_at_a_time:
            return self._step(args, kwargs)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise UsageError(
            "a compiled step cannot be copied or pickled",
            "memplan.compile, with a copy of the model and an optimizer of its parameters",
        )

    def _step(self, args: Any, kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            raise no_gradient()
        if self._micro == 0:
            self._clear_gradients()
        last = self._micro == self._options.accumulate - 1
        parameters = (p for p in self._updates.parameters() if is_lazy(p) or not p.is_inference())
        before = _Before(_generators(), [(p, p._version) for p in parameters])
        self._capture.ran = None
        try:
            # The first call of a lazy module creates its parameters and changes its class.
            lazy = any(map(is_lazy, self._updates.parameters()))
            run = self._plainly if self._fallback or lazy else partial(self._run, last, before)
            result = run(args, kwargs)
            if not any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(result)):
                kind = type(result).__name__  # of an iterator PyTorch makes a list
                raise UsageError(f"the function returns a {kind}, and no loss", "return loss")
            if last:
                self._warn_if_nothing_trains()
            if last and self._updates.updated:
                self._updates.update_rest()
            elif last:
                self._update_all()
        except BaseException as error:
            self._undo(before, error)
            raise
        self._micro = 0 if last else self._micro + 1
        self._updates.restore_state_order()
        if last and self._updates.updated:
            tell_step(self._updates.optimizers, self._updates.updated)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def _warn_if_nothing_trains(self) -> None:
        trained = self._updates.updated or any(
            p.grad is not None for p in self._updates.parameters()
        )
        if not trained and not self._warned:
            self._warned = True
            log.warning(
                "memplan: %s trains nothing: the loss depends on no parameter of the optimizer; "
                "was that made for this model, and for the parameters that it has now?",
                self.__name__,
            )

    def report(self) -> CompileReport:
        """What the step has done so far."""
        return CompileReport([*self._past, *self._reports()], self._plain_calls, self._fallback)

    def _reports(self) -> list[ProgramReport]:
        return [one.report() for one in self._capture.programs]

    # A call of the graph, or a plain one

    def _run(self, last: bool, before: _Before, args: Any, kwargs: Any) -> Any:
        capture = self._capture
        self._updates.begin()
        in_graph = self._setup.updates_in_graph()
        self._updates.in_graph = last and in_graph
        if why := self._refusal(args, kwargs):
            return self._give_up(why, args, kwargs)
        known = len(self._past) + len(capture.programs)
        if capture.is_out_of_date(updates_in_graph=in_graph):
            self._captures += 1
            if self._captures > torch._dynamo.config.recompile_limit:
                why = "what its functions, classes and hooks do changes"
                return self._give_up(why, args, kwargs)
            self._past += self._reports()
            capture.begin_anew()
        try:
            with strict():
                result = capture(*args, **kwargs)
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            if capture.ran is not None:
                if isinstance(inner, (MemplanError, torch.OutOfMemoryError)) or self._micro:
                    raise
                if self._half_done(before, error):
                    raise
                # A plain call raises the same error, unless PyTorch's trace differs from the code.
                self._restore(before)
                capture.ran = None
            if isinstance(inner, MemplanError):
                raise inner from None
            # A first call may install hooks or fill caches, so that the second can be captured.
            again = isinstance(inner, Unsupported) and not (known or self._plain_calls)
            return self._give_up(_reason(inner), args, kwargs, for_good=not again)
        if capture.ran is None:  # nothing was computed
            raise no_gradient()
        if 0 < known < len(self._past) + len(capture.programs):
            log.warning(
                "memplan: %s is captured again, for other shapes, values or code", self.__name__
            )
        return result

    def _refusal(self, args: Any, kwargs: Any) -> str:
        """Why no graph can run this call; empty where one may."""
        if autocast_cache_persists():
            return "autocast is on, outside of its context"
        if has_saved_tensor_hooks():
            return "hooks on saved tensors around the call"
        if torch.is_anomaly_enabled():
            return "autograd's detection of anomalies around the call"
        # PyTorch's compiler detaches its arguments, so that their hooks would not run.
        given = LeafHooks().refusal(pytree.tree_leaves((args, kwargs)))
        wraps = "" if self._capture.programs else wraps_several_tensors(self._updates.parameters())
        return given or wraps or self._leaf_hooks.refusal(self._updates.parameters())

    def _undo(self, before: _Before, error: BaseException) -> None:
        """After an error: undo the call where that is possible. A note on the error says which."""
        self._micro = 0
        if self._scaler is not None and self._scaler._scale is not None:
            self._scaler.update(self._scaler.get_scale())  # clears its list of unscaled gradients
        if done := self._half_done(before, error):
            self._clear_gradients()
            error.add_note(f"memplan: the step is half done: {done}. Load the last checkpoint.")
            return
        self._restore(before)
        if isinstance(error, MemplanError):
            return
        again = ", of which the first is the next" if self._options.accumulate > 1 else ""
        buffers = "" if self._capture.ran is None else "buffers, "
        error.add_note(
            f"memplan: weights, {buffers}optimizer state and generators are as before the "
            f"call{'s that gathered gradients' + again if again else ''}; gradients are cleared."
        )

    def _half_done(self, before: _Before, error: BaseException) -> str:
        """What a call has changed that cannot be undone, in words; empty where nothing."""
        changed = {id(p) for p, version in before.versions if p._version != version}
        updated = len(self._updates.updated | changed)
        ran = self._capture.ran
        written = [] if ran is None else ran.written_until(error)
        if not (updated or written):
            return ""
        also = "".join(f", {name} is written" for name in written)
        return f"{updated} of {len(before.versions)} parameters are updated{also}"

    def _restore(self, before: _Before) -> None:
        self._clear_gradients()
        self._updates.discard_new_states()
        for one, copy in before.generators:
            one.set_state(copy.get_state())

    def _give_up(self, why: str, args: Any, kwargs: Any, *, for_good: bool = True) -> Any:
        """Run the call plainly, and, if `for_good`, all later ones, too."""
        self._leaf_hooks.forget()
        result = self._plainly(args, kwargs)
        self._past += self._reports()
        if not for_good:
            self._capture.begin_anew()
            return result
        self._fallback = why
        self._capture.forget()
        log.warning("memplan: %s runs plainly: %s", self.__name__, why)
        return result

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        self._plain_calls += 1
        self._updates.updated = set()
        result = self._loss_fn(*args, **kwargs)
        losses = [one for one in pytree.tree_leaves(result) if _requires_grad(one)]
        if not losses:
            raise no_gradient()
        if len(losses) != 1:
            raise UsageError(
                f"the function returns {len(losses)} tensors that require a gradient",
                "return the loss alone, or the others detached",
            )
        check_loss(losses[0])
        loss = losses[0] if self._scaler is None else self._scaler.scale(losses[0])
        loss.backward()
        return result

    def _clear_gradients(self) -> None:
        for optimizer in self._updates.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _update_all(self) -> None:
        """Run the optimizers' step where all gradients must be there before the first update."""
        optimizers, scaler = self._updates.optimizers, self._scaler
        if self._options.clip_grad_norm is not None:
            for optimizer in optimizers:
                if scaler is not None:
                    scaler.unscale_(optimizer)
            parameters = list(self._updates.parameters())
            torch.nn.utils.clip_grad_norm_(parameters, self._options.clip_grad_norm)
        for optimizer in optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        if not self._options.keep_gradients:
            self._clear_gradients()


def _generators() -> list[tuple[torch.Generator, torch.Generator]]:
    """Each device's generator, with a copy. A copy of its state would be a tensor, which would
    count as one of the step's."""
    on_cards = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [(one, one.clone_state()) for one in (torch.default_generator, *on_cards)]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _reason(error: BaseException) -> str:
    """An error's first line, with Dynamo's explanation if there is one."""
    if isinstance(error.__cause__, Unsupported):  # too many captures, in words of its own
        error = error.__cause__
    words = str(error)
    frames = re.findall(r'^ *File "(.+)", line (\d+), in (\S+)', words, re.MULTILINE)
    if "data-dependent expression" in words and frames:
        file, line, function = frames[-1]
        place = f"{function} ({Path(file).name}:{line})"
        return f"what Python does in {place} depends on a tensor's value"
    first = first_line(error)
    explained = re.search(r"^ *Explanation: (.+)", words, re.MULTILINE)
    return f"{first}: {explained[1]}" if explained else first
