"""What a running job is doing, from hooks: forward, backward, optimizer, evaluation, and in which
module.

Forward passes and evaluations are calls of root modules, those that no other module called. A
backward pass is noticed by a hook on the tensors that the root returned, when the first of their
gradients is there. An optimizer's step is told by PyTorch's optimizer hooks. Hooks on all modules
are there only while the job is being learned; later those modules alone are hooked that were
roots. Nothing is kept alive by a hook.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memplan.types.trace import Phase

_MOST_TENSORS = 32
"""Of a root's output that get a hook."""
_DEEPEST = 4
"""Levels of an output that are searched for tensors."""

_TOLD_OF_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""A warning of PyTorch's; being called twice for one module does no harm here."""


class Listener(Protocol):
    """Is told what the job does, in the thread that does it."""

    def entered(self, phase: Phase) -> None:
        """The job begins something else than before."""

    def resumed(self, phase: Phase) -> None:
        """An evaluation ends, and this is what it interrupted."""

    def stepped(self) -> None:
        """An optimizer step is complete; `entered(FORWARD)` follows, unless in backward."""

    def in_module(self, path: str) -> None:
        """What follows belongs to this module; the empty string: to none."""


class _Thread(threading.local):
    """Calls of modules that have begun on a thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.root: torch.nn.Module | None = None
        self.outer = Phase.SETUP
        """What an evaluation interrupted."""
        self.paths: list[str] = []
        self.hooked = 0
        """Identity of the output of the module that ended last."""


class JobHooks:
    """The hooks of one job; a context manager."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._thread = _Thread()
        self._phase = Phase.SETUP
        self._resumed = False
        """Since an evaluation ended nothing else has begun."""
        self._optimizers: list[int] = []
        """Those whose step runs, the innermost last: one may wrap another."""
        self._closure = False
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """Of those that are there, the one that stepped first: its steps count."""
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._global: list[Any] = []
        self._own: list[Any] = []
        self._names: dict[int, str] = {}
        self._modules = False

    @property
    def phase(self) -> Phase:
        return self._phase

    def __enter__(self) -> JobHooks:
        self._own = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self.watch_all(modules=False)
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in (*self._global, *self._own):
            handle.remove()
        self._global, self._own = [], []

    def watch_all(self, *, modules: bool) -> None:
        """Hook every module, to see which are roots. `modules`: the listener wants their paths."""
        self._modules = modules
        if not self._global:
            warnings.filterwarnings("ignore", message=_TOLD_OF_HOOKS)
            for handle in self._own[2:]:
                handle.remove()
            del self._own[2:]
            self._global = [
                register_module_forward_pre_hook(self.before),
                register_module_forward_hook(self.after, always_call=True),
            ]

    def watch_roots(self) -> None:
        """From now on hook only the modules that have been roots. Where Dynamo has compiled, all
        stay hooked: it would compile again, and few modules are called that are not compiled."""
        self._modules = False
        self._names.clear()
        if not self._global or _has_compiled():
            return
        for handle in self._global:
            handle.remove()
        self._global = []
        for root in self._roots:
            self._own += [
                root.register_forward_pre_hook(_Before(self), prepend=True),
                root.register_forward_hook(_After(self), always_call=True),
            ]

    # Calls of modules

    def before(self, module: torch.nn.Module, _inputs: Any = None) -> None:
        """A module's call begins. Modules without modules of their own are part of their caller:
        there are many, and little is gained by telling them apart."""
        if torch.compiler.is_compiling():
            return
        thread = self._thread
        if thread.depth and not module._modules and module is not thread.root:
            return
        if thread.depth == 0 or module is thread.root:  # a root again: its last call was cut short
            thread.depth, thread.root = 0, module
            thread.paths.clear()
            self._root_begins(module)
        thread.depth += 1
        if self._modules:
            path = self._names.get(id(module)) or type(module).__name__
            thread.paths.append(path)
            self._listener.in_module(path)

    def after(self, module: torch.nn.Module, _inputs: Any, output: Any = None) -> None:
        """A module's call ends, with or without an error."""
        thread = self._thread
        if torch.compiler.is_compiling() or thread.depth == 0:
            return
        if not module._modules and module is not thread.root:
            return
        thread.depth -= 1
        if self._modules and thread.paths:
            path = thread.paths.pop()
            self._hook_module(output, path)
            self._listener.in_module(thread.paths[-1] if thread.paths else "")
        if thread.depth == 0:
            thread.root = None
            self._root_ends(output)

    def _root_begins(self, module: torch.nn.Module) -> None:
        if self._modules and id(module) not in self._names:
            name = type(module).__name__
            for path, child in module.named_modules():
                self._names[id(child)] = f"{name}.{path}" if path else name
        if self._global and module not in self._roots:
            self._roots.add(module)
        if self._updating or _in_backward():  # or a checkpointed block that runs again
            return
        if torch.is_grad_enabled():
            self._enter(Phase.FORWARD)
        elif self._phase != Phase.EVALUATION:
            self._thread.outer = self._phase
            self._enter(Phase.EVALUATION)

    def _root_ends(self, output: Any) -> None:
        if self._updating or _in_backward():
            return
        if self._phase == Phase.EVALUATION:
            self._phase, self._resumed = self._thread.outer, True
            self._listener.resumed(self._phase)
        elif torch.is_grad_enabled():
            hook = _FirstGradient(self)
            for count, tensor in enumerate(_differentiable(output, _DEEPEST)):
                if count == _MOST_TENSORS:
                    break
                tensor.register_hook(hook)

    def _hook_module(self, output: Any, path: str) -> None:
        """The backward pass of a module begins with the gradient of its output. Where a module
        returns what one that it called returned, the inner one's hook stays the last."""
        tensor = next(_differentiable(output, 2), None)
        if tensor is not None and id(tensor) != self._thread.hooked:
            self._thread.hooked = id(tensor)
            tensor.register_hook(_InModule(self, path))

    def backward_began(self) -> None:
        """The first gradient of a root's output is there."""
        if not self._updating:
            self._enter(Phase.BACKWARD)

    def backward_in(self, path: str) -> None:
        if self._modules:
            self._listener.in_module(path)

    # Optimizers

    @property
    def _updating(self) -> bool:
        """Whether an optimizer's step runs that does not run the model itself, by a closure."""
        return bool(self._optimizers) and not self._closure

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: Any = (), keywords: Any = None
    ) -> None:
        if id(optimizer) in self._optimizers:  # its last step ended with an error
            self._optimizers.clear()
        self._optimizers.append(id(optimizer))
        given = [*arguments[1:2], (keywords or {}).get("closure")]  # the first is the optimizer
        self._closure = any(closure is not None for closure in given)
        if len(self._optimizers) == 1 and not self._closure and not _in_backward():
            self._enter(Phase.OPTIMIZER)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_rest: Any) -> None:
        if id(optimizer) in self._optimizers:
            del self._optimizers[self._optimizers.index(id(optimizer)) :]
        if self._optimizers:
            return
        first = self._first_optimizer() if self._first_optimizer is not None else None
        if first is None:
            self._first_optimizer = weakref.ref(optimizer)
        if first is None or first is optimizer:
            self._listener.stepped()
        if not _in_backward():  # else one that steps as soon as its gradient is there
            self._enter(Phase.FORWARD)

    def _enter(self, phase: Phase) -> None:
        if phase != self._phase or self._resumed:
            self._phase, self._resumed = phase, False
            self._listener.entered(phase)


class _Hook:
    """A hook that copies and pickles of its module do not share."""

    def __init__(self, hooks: JobHooks | None = None) -> None:
        self._hooks = weakref.ref(hooks) if hooks is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def _of(self) -> JobHooks | None:
        return self._hooks() if self._hooks is not None else None


class _Before(_Hook):
    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        hooks = self._of()
        if hooks is not None:
            hooks.before(module, inputs)


class _After(_Hook):
    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        hooks = self._of()
        if hooks is not None:
            hooks.after(module, inputs, output)


class _FirstGradient(_Hook):
    """On all tensors that one call returned; the first gradient counts."""

    def __call__(self, _gradient: torch.Tensor) -> None:
        hooks = self._of()
        if hooks is not None:
            hooks.backward_began()
            self._hooks = None


class _InModule(_Hook):
    def __init__(self, hooks: JobHooks | None = None, path: str = "") -> None:
        super().__init__(hooks)
        self._path = path

    def __call__(self, _gradient: torch.Tensor) -> None:
        hooks = self._of()
        if hooks is not None:
            hooks.backward_in(self._path)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _has_compiled() -> bool:
    """Whether Dynamo has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return counters is not None and bool(counters["frames"]["total"])


def _differentiable(item: Any, levels: int) -> Iterator[torch.Tensor]:
    """The tensors in what a module returned that a backward pass could begin with."""
    if isinstance(item, torch.Tensor):
        if item.requires_grad and item.grad_fn is not None:
            yield item
    elif levels:
        inner: Any = ()
        if isinstance(item, Mapping):
            inner = item.values()
        elif isinstance(item, (list, tuple)):
            inner = item
        elif hasattr(item, "__dict__") and not isinstance(item, (type, torch.nn.Module)):
            inner = vars(item).values()
        for one in inner:
            yield from _differentiable(one, levels - 1)
