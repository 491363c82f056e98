"""What a running job is doing, from hooks: forward, backward, optimizer, evaluation, in which
module, and in which phase of its plan.

Forward passes and evaluations are calls of root modules, those that no other module called. A
backward pass is noticed by a hook on the tensors that the root returned, when the first of their
gradients is there. Hooks on all modules are there only while the job is being learned; later those
modules alone are hooked that were roots.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count, islice
from typing import Any, Protocol

import torch

from memplan.capturing.patches.deferred_dynamo import has_compiled
from memplan.capturing.patches.job_observer import JobObserver, ModuleCalls, OwnHook, Step
from memplan.types.trace import Phase

_MOST_TENSORS = 32
"""The most tensors of a root's output that get a hook."""
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
    def __init__(self) -> None:
        self.outer = Phase.SETUP
        """What an evaluation interrupted."""
        self.paths: list[str] = []
        """Paths of modules whose calls have begun."""
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
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer whose steps count: of those that exist, the one that stepped first."""
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._names: dict[int, str] = {}
        self._modules = False
        self._observer = JobObserver()
        self._calls = ModuleCalls(self._begins, self._ends)

    @property
    def phase(self) -> Phase:
        return self._phase

    def __enter__(self) -> JobHooks:
        self._observer.on_steps(self._step_begins, self._step_ends)
        self.watch_all(modules=False)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._observer.close()
        self._calls.close()

    def watch_all(self, *, modules: bool) -> None:
        """Hook every module, to see which are roots. `modules`: the listener wants their paths."""
        self._modules = modules
        warnings.filterwarnings("ignore", message=_TOLD_OF_HOOKS)
        self._calls.watch_all()

    def watch_roots(self) -> None:
        """From now on hook only modules that have been roots. Where Dynamo has compiled something,
        all stay hooked, because it would compile again; few modules outside of compiled code are
        called then."""
        self._modules = False
        self._names.clear()
        if not has_compiled():
            self._calls.watch_only(self._roots)

    # Calls of modules

    def _begins(self, module: torch.nn.Module, root: bool) -> None:
        if root:
            self._thread.paths.clear()
            self._root_begins(module)
        if self._modules:
            path = self._names.get(id(module)) or type(module).__name__
            self._thread.paths.append(path)
            self._listener.in_module(path)

    def _ends(self, _module: torch.nn.Module, output: Any, root: bool) -> None:
        paths = self._thread.paths
        if self._modules and paths:
            self._hook_module(output, paths.pop())
            self._listener.in_module(paths[-1] if paths else "")
        if root:
            self._root_ends(output)

    def _root_begins(self, module: torch.nn.Module) -> None:
        if self._modules and id(module) not in self._names:
            name = type(module).__name__
            for path, child in module.named_modules():
                self._names[id(child)] = f"{name}.{path}" if path else name
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
            hook = OwnHook(partial(self._backward_began, count()))
            for tensor in islice(_differentiable(output, _DEEPEST), _MOST_TENSORS):
                tensor.register_hook(hook)

    def _hook_module(self, output: Any, path: str) -> None:
        """The backward pass of a module begins with the gradient of its output. Where a module
        returns what one that it called returned, the inner one's hook stays the last."""
        tensor = next(_differentiable(output, 2), None)
        if tensor is not None and id(tensor) != self._thread.hooked:
            self._thread.hooked = id(tensor)
            tensor.register_hook(OwnHook(partial(self._backward_in, path)))

    def _backward_began(self, told: count[int], _gradient: torch.Tensor) -> None:
        """The first gradient of a root's output is there; each output has this hook."""
        if next(told) == 0 and not self._updating:
            self._enter(Phase.BACKWARD)

    def _backward_in(self, path: str, _gradient: torch.Tensor) -> None:
        if self._modules:
            self._listener.in_module(path)

    # Optimizers

    @property
    def _updating(self) -> bool:
        """Whether an optimizer's step runs that does not run the model itself, by a closure."""
        step = self._observer.step
        return step is not None and not step.closure

    def _step_begins(self, step: Step) -> None:
        if not step.within and not step.closure and not _in_backward():
            self._enter(Phase.OPTIMIZER)

    def _step_ends(self, step: Step) -> None:
        if step.within:
            return
        first = self._first_optimizer() if self._first_optimizer is not None else None
        if first is None:
            self._first_optimizer = weakref.ref(step.optimizer)
        if first is None or first is step.optimizer:
            self._listener.stepped()
        if not _in_backward():  # else one that steps as soon as its gradient is there
            self._enter(Phase.FORWARD)

    def _enter(self, phase: Phase) -> None:
        if phase != self._phase or self._resumed:
            self._phase, self._resumed = phase, False
            self._listener.entered(phase)


class PhaseCursor:
    """The number in a plan's `phases` of what the job does: the next of its kind, round and
    round."""

    def __init__(self, phases: list[str]) -> None:
        self._kinds = [name.split(" ", 1)[0] for name in phases]
        self._at = -1
        self.number = -1
        """The number of the current phase; -1 for one that the plan does not know."""

    def enter(self, phase: Phase) -> int:
        """The number of a phase that begins; -1 for one that the plan does not know."""
        kind, count = phase.name.lower(), len(self._kinds)
        if self.number >= 0 and self._kinds[self.number] == kind:
            return self.number
        ahead = (place % count for place in range(self._at + 1, self._at + 1 + count))
        self.number = next((place for place in ahead if self._kinds[place] == kind), -1)
        if self.number >= 0:
            self._at = self.number
        return self.number


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


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
