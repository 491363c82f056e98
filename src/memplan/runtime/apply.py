"""Puts a plan's recompute part into effect: on one module, or on every root module of a script."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from memplan.capture.patches.internals import require
from memplan.runtime.tape import Decisions, Inputs, Needed, Recording, decisions_by_call
from memplan.types.plan import RecomputePart

_MOST_SURPRISES = 3


class _Running(threading.local):
    """The calls that have begun on a thread, the innermost last: the frame that PyTorch runs each
    in, its recording, and which of the pass it is."""

    def __init__(self) -> None:
        self.calls: list[tuple[FrameType, Recording | None, int]] = []


class _Calls:
    """The recordings of the calls that are running, and which call of a pass comes next.

    A pass ends when backward has begun or an optimizer has stepped; the next call is the first of
    the next pass.
    """

    def __init__(
        self,
        part: RecomputePart,
        *,
        every_call: bool,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        require("runtime")
        self._on_note = on_note
        self._decisions: dict[int, Decisions] = decisions_by_call(part)
        self._every_call = every_call
        self._needed: dict[int, Needed] = {}
        """By call, as learned from the last one that was recorded whole."""
        self._surprises: Counter[int] = Counter()
        self._verified: set[int] = set()
        self._on_cuda = False
        self._pass: list[Recording] = []
        self._inputs = Inputs()
        self._running = _Running()
        self._to_compare: tuple[Recording, Decisions] | None = None

    def enter(self, root: torch.nn.Module, frame: FrameType) -> None:
        """A root module's forward begins; `frame` is that of its call."""
        self.end_interrupted()
        parameter = next(root.parameters(), None)
        if parameter is not None:  # a loss has none and follows the model
            self._on_cuda = parameter.is_cuda
        recording, call = None, 0
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpointed block runs again
        if torch.is_grad_enabled() and not in_backward:
            if any(earlier.backward_began for earlier in self._pass):
                self.new_pass()
            call = 0 if self._every_call else len(self._pass)
            decisions = self._decisions.get(call)
            if self._on_cuda and torch.cuda.is_current_stream_capturing():
                decisions = None  # a CUDA graph takes no generator's state, and no check
            first = call not in self._verified
            self._verified.add(call)
            recording = Recording(
                decisions or Decisions({}),
                verify=first,
                on_cuda=self._on_cuda,
                needed=self._needed.get(call),
                inputs=self._inputs,
            )
            self._pass.append(recording)
            if decisions is None:
                recording = None
            elif first:
                self._to_compare = recording, decisions
        self._running.calls.append((frame, recording, call))
        if recording is not None:
            recording.__enter__()

    def leave(self) -> None:
        """The forward that began last ends, with or without an error."""
        calls = self._running.calls
        _, recording, call = calls.pop() if calls else (None, None, 0)
        if recording is not None:
            recording.__exit__(None, None, None)
            self._learn(recording, call)
        if self._to_compare is not None and recording is self._to_compare[0]:
            self._compare(*self._to_compare)
            self._to_compare = None

    def end_interrupted(self) -> bool:
        """Whether a forward ended with KeyboardInterrupt or its like, of which no hook is told."""
        calls = self._running.calls
        found = False
        while calls and not _is_running(calls[-1][0]):
            _, recording, call = calls.pop()
            found = True
            if recording is not None:
                recording.abandon()
                self._verified.discard(call)
                self._pass = [other for other in self._pass if other is not recording]
        return found

    def _learn(self, recording: Recording, call: int) -> None:
        """Calls that keep changing what they do are recorded whole."""
        if recording.surprised:
            self._needed.pop(call, None)
            self._surprises[call] += 1
        elif recording.learned is not None and self._surprises[call] < _MOST_SURPRISES:
            self._needed[call] = recording.learned

    def _compare(self, recording: Recording, decisions: Decisions) -> None:
        if self._on_note is not None and recording.found < decisions.named:
            self._on_note(
                f"{recording.found} of the {decisions.named} values that the plan drops were met "
                "in this forward pass: was the plan made for other arguments? The numbers are the "
                "same in any case; the peak may be higher than the plan promises. `memplan fit` "
                "makes a plan for this job"
            )

    def new_pass(self) -> None:
        self._pass.clear()
        self._inputs.forget_what_was_used()


def _caller() -> FrameType:
    """The frame that calls a hook, which calls this."""
    return sys._getframe(2)


def _is_running(frame: FrameType) -> bool:
    """Whether it is one of those that lead to here."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


class AppliedToModule:
    """A plan in effect on one module: every forward of it with gradients follows the plan.

    `remove()`, or leaving it as a context manager, takes it off again. Copies and pickles of the
    module carry no plan.
    """

    def __init__(self, module: torch.nn.Module, part: RecomputePart) -> None:
        self.part = part
        self._calls = _Calls(part, every_call=True)
        self._handles = [
            module.register_forward_pre_hook(_Enter(self._calls), prepend=True),
            module.register_forward_hook(_Leave(self._calls), always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._calls.end_interrupted()

    def __enter__(self) -> AppliedToModule:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.remove()


class _Enter:
    """A hook that copies of its module do not share."""

    def __init__(self, calls: _Calls | None = None) -> None:
        self.calls = calls

    def __call__(self, module: torch.nn.Module, *_arguments: Any) -> None:
        if self.calls is not None and not torch.compiler.is_compiling():
            self.calls.enter(module, _caller())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _Leave(_Enter):
    def __call__(self, module: torch.nn.Module, *_arguments: Any) -> None:
        if self.calls is not None and not torch.compiler.is_compiling():
            self.calls.leave()


class AppliedEverywhere:
    """A plan in effect on a script: on every module that no other module called.

    A context manager. Modules called in other threads than the one that entered are left alone.
    """

    def __init__(self, part: RecomputePart, on_note: Callable[[str], None] | None = None) -> None:
        """`on_note` is told, in a sentence, when the job is not the one that was planned for."""
        self._calls = _Calls(part, every_call=False, on_note=on_note)
        self._thread = threading.get_ident()
        self._depth = 0
        """Of modules that call each other, the root among them."""
        self._root: torch.nn.Module | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> AppliedEverywhere:
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
            register_optimizer_step_post_hook(self._stepped),
        ]
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._calls.end_interrupted()

    def _before(self, module: torch.nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if self._depth and module is self._root and self._calls.end_interrupted():
            self._depth = 0
        if self._depth == 0:
            self._root = module
            self._calls.enter(module, _caller())
        self._depth += 1

    def _after(self, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth == 0:
            self._root = None
            self._calls.leave()

    def _stepped(self, *_arguments: Any) -> None:
        self._calls.new_pass()
