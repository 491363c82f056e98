"""What a job does, for whoever wants to know: backward passes, optimizer steps, calls of modules.

Steps and calls are told by PyTorch's own hooks. The engine has none for the beginning and the end
of a backward pass: the function by which `torch.autograd` calls it is replaced, here and nowhere
else. A capture follows calls of modules by `Module.__call__` instead (`session.py`): it answers
some without running them, and hooks on all modules would become part of what the job compiles.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memplan.capturing.patches.attributes import Patches

Around = Callable[..., AbstractContextManager[object]]
_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code of the function that PyTorch puts around each `step`."""
_UPDATED = "memplan_updated"
"""Keyword of a step that is told by `tell_step`."""


@dataclass(frozen=True)
class Step:
    optimizer: torch.optim.Optimizer
    closure: bool = False
    """Whether it is given one, which may run the model."""
    within: int = 0
    """Number of steps that this one is part of: an optimizer may call another one."""
    updated: set[int] = field(default_factory=set)
    """For a reported step: ids of the parameters that were updated without it."""


class JobObserver:
    """Tells its subscribers what the job does, in the thread that does it. What they raise is
    raised in the job.

    Each subscriber has a context of its own around a backward pass, and around the contexts of all
    who subscribed before, also with another observer: it sees their errors and those of the pass.
    Of steps subscribers are told in the order in which they subscribed; where one raises, the later
    ones are not told. A step that ends by an error has no end; it is over when the next one begins.
    """

    def __init__(self, patches: Patches | None = None, *, alters_steps: bool = False) -> None:
        """`patches`: what the engine's function is replaced with, which are undone by whoever made
        them. `alters_steps`: what a subscriber does changes what a step does."""
        self.alters_steps = alters_steps
        self._patches = Patches() if patches is None else patches
        self._stack = ExitStack()
        if patches is None:
            self._stack.callback(self._patches.undo)
        self._steps: list[Step] = []
        self._begins: list[Callable[[Step], None]] = []
        self._ends: list[Callable[[Step], None]] = []

    def close(self) -> None:
        """Nobody is told any more."""
        self._stack.close()

    def on_backward(self, around: Around) -> None:
        """`around` is called as the engine is, with the roots, their gradients, whether to keep and
        to create a graph, and chosen inputs; the pass runs in what it returns."""
        real = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with around(*args, **kwargs):
                return real(*args, **kwargs)

        self._patches.set(torch.autograd, "_engine_run_backward", run_backward)

    def on_steps(
        self,
        begins: Callable[[Step], None] = lambda _step: None,
        ends: Callable[[Step], None] = lambda _step: None,
    ) -> None:
        if not self._begins:
            pre = register_optimizer_step_pre_hook(self._before_step)
            post = register_optimizer_step_post_hook(self._after_step)
            self._stack.callback(pre.remove)
            self._stack.callback(post.remove)
        self._begins.append(begins)
        self._ends.append(ends)

    @property
    def step(self) -> Step | None:
        """The step that runs, the innermost one."""
        return self._steps[-1] if self._steps else None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Of a step that raised an error no hook was told. None is seen where it is compiled.
        if running := sum(frame.f_code is _STEP for frame in _callers()):
            del self._steps[running - 1 :]
        closures = (*args[1:2], kwargs.get("closure"))  # the first argument is the optimizer
        closure = any(given is not None for given in closures)
        step = Step(optimizer, closure, len(self._steps), kwargs.get(_UPDATED, set()))
        self._steps.append(step)
        for begins in self._begins:
            begins(step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_rest: Any) -> None:
        begun = [step for step in self._steps if step.optimizer is optimizer]
        step = begun[-1] if begun else Step(optimizer)
        del self._steps[step.within :]
        for ends in self._ends:
            ends(step)


def tell_step(optimizers: Iterable[torch.optim.Optimizer], updated: set[int]) -> None:
    """Have memplan's own hooks count a step of each optimizer, where what is compiled updates
    parameters as soon as their gradients are there."""
    for optimizer in optimizers:
        for hook in _step_hooks():
            if _only_looks(hook):
                hook(optimizer, (), {_UPDATED: updated})


def others_see_steps() -> bool:
    """Whether a hook that is not memplan's, or changes what a step does, listens to all steps."""
    return not all(map(_only_looks, _step_hooks()))


def others_precede_steps() -> bool:
    """Whether a hook that is not memplan's comes before all steps."""
    hooks: Mapping[int, Any] = _global_optimizer_pre_hooks
    return not all(map(_is_ours, hooks.values()))


def _step_hooks() -> list[Any]:
    before: Mapping[int, Any] = _global_optimizer_pre_hooks
    after: Mapping[int, Any] = _global_optimizer_post_hooks
    return [*before.values(), *after.values()]


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("memplan.")


def _only_looks(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    return _is_ours(hook) and not (isinstance(owner, JobObserver) and owner.alters_steps)


def _callers() -> Iterator[FrameType]:
    """The frames that lead to here, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class OwnHook:
    """A hook of one module or tensor, which copies and pickles of it do not share."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> None:
        if self.call is not None and not torch.compiler.is_compiling():
            self.call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnHook, ()


class _Calls(threading.local):
    """Calls of modules that have begun on a thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.root: torch.nn.Module | None = None
        self.frame: FrameType | None = None
        """The frame in which PyTorch runs the root."""


class ModuleCalls:
    """Calls of root modules, which no other module called, and of the modules below that have
    modules of their own: of the rest there are many, and they are part of their caller.

    `begins(module, root)` and `ends(module, output, root)` are told in the thread of the call, of
    one that raises an Exception too. No hook is told of one that KeyboardInterrupt or the like
    ends: it is over when its root is called again.
    """

    def __init__(
        self,
        begins: Callable[[torch.nn.Module, bool], None],
        ends: Callable[[torch.nn.Module, Any, bool], None],
    ) -> None:
        self._tell = begins, ends
        self._calls = _Calls()
        self._handles: list[Any] = []

    def watch_all(self) -> None:
        """Hook all modules, those to come too."""
        self.close()
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def watch_only(self, modules: Iterable[torch.nn.Module]) -> None:
        """Hook these and no others."""
        self.close()
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(OwnHook(self._before), prepend=True),
                module.register_forward_hook(OwnHook(self._after), always_call=True),
            ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: torch.nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls
        if calls.depth and not module._modules and module is not calls.root:
            return
        if module is calls.root:
            self.end_interrupted()
        calls.depth += 1
        if calls.depth == 1:
            callers = _callers()
            calls.root = module
            calls.frame = next(one for one in callers if one.f_code.co_filename != __file__)
        self._tell[0](module, calls.depth == 1)

    def _after(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        calls = self._calls
        if torch.compiler.is_compiling() or not calls.depth:
            return
        if not module._modules and module is not calls.root:
            return
        calls.depth -= 1
        if not calls.depth:
            calls.root = calls.frame = None
        self._tell[1](module, output, not calls.depth)

    def end_interrupted(self) -> bool:
        """Whether no call of a root runs in this thread; one that no hook was told the end of does
        not."""
        calls = self._calls
        if calls.frame is None or calls.frame not in _callers():
            calls.depth, calls.root, calls.frame = 0, None, None
        return calls.frame is None
