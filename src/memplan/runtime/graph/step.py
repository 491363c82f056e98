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
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from memplan.capturing.patches.job_observer import tell_step
from memplan.runtime.graph.compile import Options
from memplan.runtime.graph.dependencies import Operators
from memplan.runtime.graph.guarded import casts_stay, saving_is_hooked, strict, unguarded
from memplan.runtime.graph.joint import check_loss
from memplan.runtime.graph.leaves import Leaves
from memplan.runtime.graph.report import CompileReport, ProgramReport
from memplan.runtime.graph.step_capture import LookedError, StepCapture, no_gradient, of_several
from memplan.runtime.graph.updates import Updates
from memplan.types.errors import MemplanError, UsageError, first_line

log = logging.getLogger("memplan")

P = ParamSpec("P")

_one_at_a_time = threading.RLock()
"""Calls of several threads wait for each other, also of different steps: PyTorch's compiler is
changed as long as one of them runs (`strict`)."""


@dataclass(frozen=True)
class _Before:
    """A call, as undoing it wants it."""

    generators: list[tuple[torch.Generator, torch.Generator]]
    versions: list[tuple[torch.Tensor, int]]
    """Of parameters."""


class CompiledStep(Generic[P]):
    """A step as `compile` makes it. Call it with a batch; `report()` says what it does."""

    def __init__(
        self,
        loss_fn: Callable[P, torch.Tensor],
        optimizers: tuple[torch.optim.Optimizer, ...],
        scaler: torch.amp.GradScaler | None,
        options: Options,
    ) -> None:
        # Attributes of a loss function that is an object may have names of a step's own.
        functools.update_wrapper(self, loss_fn, updated=())
        self.__name__: str = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._loss_fn = loss_fn
        self._scaler = scaler
        self._options = options
        self._updates = Updates(optimizers)
        self._updates.keep_gradients = options.keep_gradients
        self._leaves = Leaves()
        # The same graph with and without updates, and what Inductor does not fuse.
        self._updates.whole = options.accumulate > 1 or options.codegen == "inductor"
        self._past: list[ProgramReport] = []
        """Of those that are never run again."""
        self._micro = 0
        self._plain_calls = 0
        self._said = False
        """That nothing is trained."""
        self._fallback = unguarded()
        self._captures = 0
        """Of all, anew, because of what no guard compares."""
        self._capture = StepCapture(loss_fn, self._updates, scaler, options)
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
            self._clear()
        last = self._micro == self._options.accumulate - 1
        before = _Before(_generators(), [(p, p._version) for p in self._updates.parameters()])
        self._capture.ran = None
        try:
            # A lazy module makes its parameters in the first call, and takes itself apart.
            lazy = any(map(is_lazy, self._updates.parameters()))
            run = self._plainly if self._fallback or lazy else partial(self._run, last, before)
            result = run(args, kwargs)
            if not any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(result)):
                kind = type(result).__name__  # an iterator, of which PyTorch returns the items
                raise UsageError(f"the function returns a {kind}, and no loss", "return loss")
            if last:
                self._say_if_nothing_trains()
            if last and self._updates.done:
                self._updates.update_rest()
            elif last:
                self._update_all()
        except BaseException as error:
            self._undo(before, error)
            raise
        self._micro = 0 if last else self._micro + 1
        self._updates.in_their_order()
        if last and self._updates.done:
            tell_step(self._updates.optimizers, self._updates.done)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def _say_if_nothing_trains(self) -> None:
        trained = self._updates.done or any(p.grad is not None for p in self._updates.parameters())
        if not trained and not self._said:
            self._said = True
            log.warning(
                "memplan: %s trains nothing: the loss depends on no parameter of the optimizer; "
                "was that made for this model, and for the parameters that it has now?",
                self.__name__,
            )

    def report(self) -> CompileReport:
        """What has become of the step so far."""
        return CompileReport([*self._past, *self._reports()], self._plain_calls, self._fallback)

    def _reports(self) -> list[ProgramReport]:
        return [one.report() for one in self._capture.programs]

    def operators(self, *args: P.args, **kwargs: P.kwargs) -> Operators:
        """The whole step as a graph in program order, for these arguments; it is not run.

        Raises UsageError where PyTorch cannot capture it in one graph.
        """
        with _one_at_a_time:
            return self._look(args, kwargs)

    def _look(self, args: Any, kwargs: Any) -> Operators:
        self._updates.begin()
        self._updates.in_graph = self._capture.can_update_in_graph()
        self._capture.only_looks = self._updates.ahead = True
        try:
            self._capture(*args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, LookedError):
                return error.inner_exception.found
            why = _reason(error.inner_exception)
            raise UsageError(f"no graph: {why}", "another function") from error
        except TorchDynamoException as error:
            raise UsageError(f"no graph: {_reason(error)}", "another function") from error
        finally:
            self._capture.only_looks = self._updates.ahead = False
            self._updates.take_classes()
        raise UsageError("these arguments were compiled before", "another compiled step")

    # One call

    def _run(self, last: bool, before: _Before, args: Any, kwargs: Any) -> Any:
        capture = self._capture
        self._updates.begin()
        in_graph = capture.can_update_in_graph()
        self._updates.in_graph = last and in_graph
        # PyTorch's compiler detaches what it is given.
        given = Leaves().refusal(pytree.tree_leaves((args, kwargs)))
        if why := given or self._leaves.refusal(self._updates.parameters()):
            return self._give_up(why, args, kwargs)
        if casts_stay():
            return self._give_up("autocast is on, outside of its context", args, kwargs)
        if saving_is_hooked():
            return self._give_up("hooks on saved tensors around the call", args, kwargs)
        if not capture.programs and (why := of_several(self._updates.parameters())):
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
                # The plain call raises it, too, unless PyTorch traced what does not run so.
                self._take_back(before)
                capture.ran = None
            if isinstance(inner, MemplanError):
                raise inner from None
            # What a first call prepares (hooks, caches) is there in the second.
            again = isinstance(inner, Unsupported) and not (known or self._plain_calls)
            return self._give_up(_reason(inner), args, kwargs, for_good=not again)
        if capture.ran is None:  # nothing was computed
            raise no_gradient()
        if 0 < known < len(self._past) + len(capture.programs):
            log.warning(
                "memplan: %s is captured again, for other shapes, values or code", self.__name__
            )
        return result

    def _undo(self, before: _Before, error: BaseException) -> None:
        """After an error in the middle: as before the call where it can be, with words if not."""
        self._micro = 0
        if self._scaler is not None and self._scaler._scale is not None:
            self._scaler.update(self._scaler.get_scale())  # forgets which gradients are unscaled
        if done := self._half_done(before, error):
            self._clear()
            error.add_note(f"memplan: the step is half done: {done}. Load the last checkpoint.")
            return
        self._take_back(before)
        if isinstance(error, MemplanError):
            return
        again = ", of which the first is the next" if self._options.accumulate > 1 else ""
        buffers = "" if self._capture.ran is None else "buffers, "
        error.add_note(
            f"memplan: weights, {buffers}optimizer state and generators are as before the "
            f"call{'s that gathered gradients' + again if again else ''}; gradients are cleared."
        )

    def _half_done(self, before: _Before, error: BaseException) -> str:
        """What a call has changed that is not taken back, in words; empty where nothing."""
        changed = {id(p) for p, version in before.versions if p._version != version}
        updated = len(self._updates.done | changed)
        ran = self._capture.ran
        written = [] if ran is None else ran.written_until(error)
        if not (updated or written):
            return ""
        also = "".join(f", {name} is written" for name in written)
        return f"{updated} of {len(before.versions)} parameters are updated{also}"

    def _take_back(self, before: _Before) -> None:
        self._clear()
        self._updates.forget_begun()
        for one, copy in before.generators:
            one.set_state(copy.get_state())

    def _give_up(self, why: str, args: Any, kwargs: Any, *, for_good: bool = True) -> Any:
        """`for_good`: else the next call is captured, if it can be."""
        self._leaves.forget()
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
        self._updates.done = set()
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

    def _clear(self) -> None:
        for optimizer in self._updates.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _update_all(self) -> None:
        """As the plain loop ends, where gradients must all be there before the first update."""
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
            self._clear()


def _generators() -> list[tuple[torch.Generator, torch.Generator]]:
    """Each device's, and a copy: no tensor, which would count among the step's."""
    on_cards = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [(one, one.clone_state()) for one in (torch.default_generator, *on_cards)]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _reason(error: BaseException) -> str:
    """An error's first line, and what Dynamo explains."""
    words = str(error)
    frames = re.findall(r'^ *File "(.+)", line (\d+), in (\S+)', words, re.MULTILINE)
    if "data-dependent expression" in words and frames:
        file, line, function = frames[-1]
        place = f"{function} ({Path(file).name}:{line})"
        return f"what Python does in {place} depends on a tensor's value"
    first = first_line(error)
    explained = re.search(r"^ *Explanation: (.+)", words, re.MULTILINE)
    return f"{first}: {explained[1]}" if explained else first
