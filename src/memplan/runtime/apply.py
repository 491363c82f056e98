"""Puts a plan's parts `recompute` and `offload` into effect, on a module or a whole script."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memplan.capturing.patches.internals import require
from memplan.capturing.patches.job_observer import JobObserver, ModuleCalls
from memplan.capturing.recording.context import class_name
from memplan.runtime.tape import (
    Call,
    Decisions,
    Inputs,
    Needed,
    Offload,
    Pass,
    Recording,
    decisions_by_call,
    hooks_are_refused,
)
from memplan.runtime.tape.settings import tensors_are_fake
from memplan.types.plan import OffloadPart, RecomputePart

_MOST_SURPRISES = 3
_UNKNOWN = -1
"""A call that the plan's steps do not have."""


class _Running(threading.local):
    """The call that has begun on a thread: its recording, and which of the pass it is."""

    call: tuple[Recording | None, Call] | None = None


class RootNames:
    """Names root modules as plans do (`RecomputePart.kinds`)."""

    def __init__(self) -> None:
        self._names = weakref.WeakKeyDictionary[torch.nn.Module, str]()
        self._owners = defaultdict[str, WeakTensorKeyDictionary](WeakTensorKeyDictionary)
        """By class and parameter: the module's number."""

    def of(self, root: torch.nn.Module) -> str:
        name = self._names.get(root)
        if name is None:
            name = self._names[root] = self._named(root)
        return name

    def _named(self, root: torch.nn.Module) -> str:
        name, parameters = class_name(root), list(root.parameters())
        if not parameters:  # nothing in a trace tells those apart
            return name
        owners = self._owners[name]
        number = next((owners[one] for one in parameters if one in owners), None)
        if number is None:
            number = max(owners.values(), default=-1) + 1
        owners.update(dict.fromkeys(parameters, number))
        return f"{name}#{number}" if number else name


class _Calls:
    """The recordings of the calls that are running, and which call of a pass comes next.

    A pass ends when backward has begun or an optimizer has stepped; the next call is the first of
    the next pass.
    """

    def __init__(
        self,
        part: RecomputePart | None,
        offload: Offload | None = None,
        *,
        every_call: bool,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        require("runtime")
        self._on_note = on_note
        self._offload = offload
        offloaded = offload.part if offload is not None else None
        self._decisions = decisions_by_call(part, offloaded)
        self._every_call = every_call
        self._calls = part.calls if part is not None else 0
        kinds = part.kinds if part is not None else []
        self._named = {name for kind in kinds for name in kind}
        self._longest = max(map(len, kinds), default=0)
        self._names = RootNames()
        self._called: tuple[str, ...] = ()
        """Names of the planned roots that the current pass has called; of more than any kind calls,
        only one more."""
        self._roots: dict[int, int] = {}
        """Roots by id, in the order of first calls in the step; only for passes in flight."""
        self._needed: dict[Call, Needed] = {}
        """What the replays of each call need, from the last one that was recorded completely."""
        self._surprises: Counter[Call] = Counter()
        self._met: set[Call] = set()
        """Calls that have been made."""
        self._verified: set[Call] = set()
        """Calls of which one was checked in a backward pass."""
        self._to_verify: list[tuple[Recording, Call]] = []
        self._on_cuda = False
        self._pass: list[Recording] = []
        self._offloaded: Pass | None = None
        """Offloaded values of the current pass."""
        self._inputs = Inputs()
        self._running = _Running()
        self._to_compare: tuple[Recording, Decisions] | None = None

    def enter(self, root: torch.nn.Module) -> None:
        """A root module's forward begins."""
        self.end_interrupted()
        parameter = next(root.parameters(), None)
        if parameter is not None:  # a loss has none and follows the model
            self._on_cuda = parameter.is_cuda
        recording: Recording | None = None
        call: Call = 0
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpointed block runs again
        if torch.is_grad_enabled() and not in_backward:
            if any(earlier.backward_began for earlier in self._pass):
                self.new_pass()
            call = self._number(root)
            decisions = self._decisions.get(call)
            if self._on_cuda and torch.cuda.is_current_stream_capturing():
                decisions = None  # a CUDA graph takes no generator's state, and no check
            if hooks_are_refused():
                decisions = None  # `torch.func.grad` calls the module itself
            first = call not in self._met
            self._met.add(call)
            if self._offload is not None and self._offloaded is None:
                self._offloaded = Pass(self._offload)
            recording = Recording(
                decisions or Decisions({}),
                verify=call not in self._verified,
                on_cuda=self._on_cuda,
                needed=self._needed.get(call),
                inputs=self._inputs,
                of_pass=self._offloaded,
            )
            self._pass.append(recording)
            if recording.verify:
                self._to_verify.append((recording, call))
            if decisions is None:
                recording = None
            elif first:
                self._to_compare = recording, decisions
        self._running.call = recording, call
        if recording is not None:
            recording.__enter__()

    def _number(self, root: torch.nn.Module) -> Call:
        """The number of a call in its pass, or the names of the roots called up to it."""
        if self._calls:
            return self._roots.setdefault(id(root), len(self._roots)) % self._calls
        if self._named:
            name = self._names.of(root)
            if name not in self._named:
                return _UNKNOWN
            self._called = (*self._called, name)[: self._longest + 1]
            return self._called
        return 0 if self._every_call else len(self._pass)

    def leave(self) -> None:
        """The forward that began last ends, with or without an error."""
        recording, call = self._running.call or (None, 0)
        self._running.call = None
        if recording is not None:
            recording.__exit__(None, None, None)
            self._learn(recording, call)
        if self._to_compare is not None and recording is self._to_compare[0]:
            self._compare(*self._to_compare)
            self._to_compare = None

    def end_interrupted(self) -> None:
        """End the last forward if KeyboardInterrupt or the like, which calls no hook, ended it."""
        recording, call = self._running.call or (None, 0)
        self._running.call = None
        if isinstance(call, tuple):
            self._called = call[:-1]
        if recording is not None:
            recording.abandon()
            self._met.discard(call)
            self._pass = [other for other in self._pass if other is not recording]
            self._to_verify = [one for one in self._to_verify if one[0] is not recording]

    def _learn(self, recording: Recording, call: Call) -> None:
        """Calls that keep changing what they do are recorded whole."""
        if recording.surprised:
            self._needed.pop(call, None)
            self._surprises[call] += 1
        elif recording.learned is not None and self._surprises[call] < _MOST_SURPRISES:
            self._needed[call] = recording.learned

    def _compare(self, recording: Recording, decisions: Decisions) -> None:
        if self._on_note is not None and recording.found < decisions.moved:
            sends = " or offloads" if self._offload is not None else ""
            device = "" if self._on_cuda else " (The CPU's operators are not all those of a card.)"
            text = (
                f"{recording.found} of the {decisions.moved} values that the plan drops{sends} "
                "were met in this forward pass"
            )
            if not tensors_are_fake():  # a capture has no numbers, and shows the peak itself
                text += (
                    f": was the plan made for other arguments?{device} This changes no number; the "
                    "peak may be higher than the plan promises. `memplan fit` makes a plan for "
                    "this job"
                )
            self._on_note(text)

    def note_unmet(self) -> None:
        """Say so where the job made none of the calls that the plan is about."""
        unmet = bool(self._decisions and self._met) and self._met.isdisjoint(self._decisions)
        if self._on_note is not None and unmet:
            self._on_note(
                "the job called none of the modules in which the plan drops values, so it ran as "
                "without it: was the plan made for other arguments? `memplan fit` makes a plan for "
                "this job"
            )

    def new_pass(self) -> None:
        # A pipeline tries its stages out, on memory as it is found, and without a backward pass.
        self._verified |= {call for one, call in self._to_verify if one.backward_began}
        self._to_verify.clear()
        self._pass.clear()
        self._called = ()
        self._offloaded = None
        self._inputs.forget_what_was_used()

    def end_step(self) -> None:
        self.new_pass()
        self._roots.clear()


class _Applied:
    """A context manager."""

    offload: Offload | None = None

    def __init__(self, calls: _Calls, *, every_thread: bool) -> None:
        self._calls = calls
        self._thread = None if every_thread else threading.get_ident()
        self._modules = ModuleCalls(self._begins, self._ends)

    def remove(self) -> None:
        self._modules.close()
        if self._modules.end_interrupted():
            self._calls.end_interrupted()
        if self.offload is not None:
            self.offload.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.remove()

    def _begins(self, module: torch.nn.Module, root: bool) -> None:
        if root and self._thread in (None, threading.get_ident()):
            self._calls.enter(module)

    def _ends(self, _module: torch.nn.Module, _output: Any, root: bool) -> None:
        if root and self._thread in (None, threading.get_ident()):
            self._calls.leave()


class AppliedToModule(_Applied):
    """A plan in effect on one module: every forward of it with gradients follows the plan.

    `remove()`, or leaving it as a context manager, takes it off again. Copies and pickles of the
    module carry no plan.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        part: RecomputePart,
    ) -> None:
        super().__init__(_Calls(part, every_call=True), every_thread=True)
        self._modules.watch_only([module])


class AppliedEverywhere(_Applied):
    """A plan in effect on a script: on every module that no other module called.

    A context manager. Modules called in other threads than the one that made it are left alone.
    """

    def __init__(
        self,
        part: RecomputePart | None,
        on_note: Callable[[str], None] = lambda text: None,
        offload: OffloadPart | None = None,
        *,
        devices: tuple[str, ...] = ("cuda",),
    ) -> None:
        """`on_note` is told, in a sentence, when the job or the host is not what was planned for.
        `devices`: kinds of device from which values are offloaded."""
        if offload is not None:
            self.offload = Offload(offload, on_note, devices=devices)
        calls = _Calls(part, self.offload, every_call=False, on_note=on_note)
        super().__init__(calls, every_thread=False)
        self._observer = JobObserver()

    def __enter__(self) -> Self:
        self._modules.watch_all()
        self._observer.on_steps(ends=lambda _step: self._calls.end_step())
        return self

    def remove(self) -> None:
        self._observer.close()
        super().remove()
        self._calls.note_unmet()
