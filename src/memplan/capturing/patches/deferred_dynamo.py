"""`torch._dynamo` that is not imported before somebody needs it.

PyTorch imports Dynamo, and SymPy with it, wherever a fake mode is made and wherever an optimizer, a
checkpoint or FSDP wants to be left alone by it. That takes seconds, and most jobs compile nothing.
So a module stands in its place that has what those ask for:

- its settings, which need nothing else of it;
- `disable` and `graph_break`, which have nothing to do as long as there is no Dynamo.

Whatever else is asked of it, of it or of one of its other submodules, imports it then.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NAME = "torch._dynamo"
_ALONE = frozenset({"torch._dynamo.config", "torch._dynamo._trace_wrapped_higher_order_op"})
"""Submodules that use nothing of the package while they are imported. The second is imported with
every language model of transformers."""
_CACHE = "__dynamo_disable"
"""The attribute in which `torch/_compile.py` stores what `disable` returned for a function."""


class DeferredDynamo:
    """Stands in the module's place from `start` on, until that is imported."""

    def __init__(self) -> None:
        self.waiting = False
        self.reset()
        self._importing = False
        self._lock = threading.RLock()
        self._left_alone: list[types.FunctionType] = []
        self._answers: dict[str, Any] = {
            "disable": self.disable,
            "graph_break": _graph_break,
            "trace_rules": _Rules(),
        }

    def reset(self) -> None:
        """Nothing is to be done about its import."""
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """A context manager that is entered meanwhile."""
        self.afterwards: Callable[[], None] = lambda: None
        """Called once it is there."""

    def start(self) -> None:
        """Does nothing where the module has been imported, or is waiting already."""
        spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
        if spec is None or spec.loader is None:
            return
        self._loader = spec.loader
        self._module = _stand_in(self, spec)
        vars(self._module).update(self._answers)
        self._finder = _Submodules(self)
        self.waiting = True
        sys.modules[_NAME] = self._module
        vars(torch)["_dynamo"] = self._module
        sys.meta_path.insert(0, self._finder)

    def load(self) -> bool:
        """Import it, into the module that stands there; False in the midst of that, when what that
        lacks it really lacks."""
        with self._lock:
            if self._importing:
                return False
            if self.waiting:
                self._importing, self.waiting = True, False
                self._step_aside()
                try:
                    with self.around():
                        self._loader.exec_module(self._module)
                except BaseException:
                    sys.modules.pop(_NAME, None)
                    raise
                finally:
                    self._importing = False
                    self._module.__class__ = types.ModuleType
                self.afterwards()
            return True

    def _step_aside(self) -> None:
        sys.meta_path.remove(self._finder)
        for name in self._answers:
            vars(self._module).pop(name)
        for function in self._left_alone:
            vars(function).pop(_CACHE, None)
        self._left_alone.clear()

    def disable(
        self, fn: Any = None, recursive: bool = True, *, reason: Any = None, wrapping: bool = True
    ) -> Any:
        """`torch._dynamo.disable`: functions as they are, as long as nothing can be compiled."""
        if not isinstance(fn, types.FunctionType):
            self.load()
            return self._module.disable(fn, recursive, reason=reason, wrapping=wrapping)
        if not wrapping:  # `torch/_compile.py`, which calls it now and keeps it
            self._left_alone.append(fn)
            return fn

        @functools.wraps(fn)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            if self.waiting:
                return fn(*args, **kwargs)
            return self._module.disable(fn, recursive, reason=reason)(*args, **kwargs)

        return disabled


class _Rules:
    """`torch._dynamo.trace_rules`, which `init_process_group` wants to remember nothing."""

    def clear_lru_cache(self) -> None:
        """There is nothing yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{_NAME}.trace_rules"), name)


def _graph_break(_msg: str = "") -> None:
    """Does nothing where nothing is compiled."""


def _stand_in(deferred: DeferredDynamo, spec: importlib.machinery.ModuleSpec) -> Any:
    def missing(module: types.ModuleType, name: str) -> Any:
        if not name.startswith("__") and deferred.load():
            return getattr(module, name)
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")

    module = importlib.util.module_from_spec(spec)
    module.__class__ = type("DeferredModule", (types.ModuleType,), {"__getattr__": missing})
    return module


class _Submodules(importlib.abc.MetaPathFinder):
    """Has the package imported before any of its submodules but those that do without."""

    def __init__(self, deferred: DeferredDynamo) -> None:
        self._deferred = deferred

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import protocol."""
        if not fullname.startswith(_NAME + ".") or fullname in _ALONE:
            return None
        self._deferred.load()
        module = sys.modules.get(fullname)  # where the package has imported it
        spec = None if module is None else module.__spec__
        if module is None or spec is None:
            return None
        # Python takes the module's own spec from here on, and would run the module a second time.
        spec.loader = _There(module, spec.loader)
        return spec


class _There(importlib.abc.Loader):
    """Loads a module that has been imported already, once."""

    def __init__(self, module: types.ModuleType, loader: Any) -> None:
        self._module = module
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader


dynamo = DeferredDynamo()
"""The instance of this process."""


def has_compiled() -> bool:
    """Whether Dynamo has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return counters is not None and bool(counters["frames"]["total"])
