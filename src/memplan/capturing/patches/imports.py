"""Adapts packages: at once where they are imported already, else when they are."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.internals import MissingNameError, refusal

Adapter = Callable[[types.ModuleType], None]


class WrappedLoader(importlib.abc.Loader):
    """Loads as another loader does; those derived from it do something before or after."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)


class _Loader(WrappedLoader):
    def __init__(self, loader: Any, adapt: Adapter) -> None:
        super().__init__(loader)
        self._adapt = adapt

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        super().exec_module(module)
        self._adapt(module)


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls `adapters[name]` with each module of that name once it is imported."""

    def __init__(self, adapters: dict[str, Adapter]) -> None:
        self._adapters = {name: [adapt] for name, adapt in adapters.items()}
        self._busy: set[str] = set()
        self._refused = Patches()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import protocol: wraps the loader of a watched module."""
        if fullname not in self._adapters or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, partial(self._adapt, fullname))
        return spec

    def _adapt(self, name: str, module: types.ModuleType) -> None:
        for adapt in self._adapters[name]:
            self._try(adapt, module)

    def _try(self, adapt: Adapter, module: types.ModuleType) -> None:
        """Adapt a module. Where PyTorch lacks what `adapt` replaces, using the module is refused,
        but importing it is not: others may import it without using it."""
        try:
            adapt(module)
        except Exception as error:
            reason = error if isinstance(error, MissingNameError) else refusal(error)
            if reason is None:
                raise
            self._refuse_uses(module, reason)

    def _refuse_uses(self, module: types.ModuleType, reason: MissingNameError) -> None:
        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise reason

        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(value):
                self._refused.set(value, "__init__", refuse)
            elif inspect.isfunction(value):
                self._refused.set(module, name, refuse)

    def add(self, name: str, adapt: Adapter) -> None:
        """Watch for one more module, or adapt it now if it is there."""
        self._adapters.setdefault(name, []).append(adapt)
        if self in sys.meta_path and (module := sys.modules.get(name)) is not None:
            self._try(adapt, module)

    def start(self) -> None:
        """Adapt what is imported already, and watch for the rest."""
        for name in self._adapters:
            if (module := sys.modules.get(name)) is not None:
                self._adapt(name, module)
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Watch no more."""
        self._refused.undo()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
