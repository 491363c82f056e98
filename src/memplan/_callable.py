"""Lets `memplan.capture()` be called although it is a package."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def make_callable(module: str, function: str) -> None:
    """Calling `module` calls `memplan.api.<function>`, which is imported when it is needed."""

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module("memplan.api"), function)(*args, **kwargs)

    sys.modules[module].__class__ = CallableModule
