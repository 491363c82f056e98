"""Libraries that write or call out by themselves: each is adapted when it is, or gets, imported."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import Adapter
from memplan.capturing.sandbox.changes import native_path
from memplan.capturing.sandbox.patches import replace_by_name
from memplan.capturing.sandbox.view import View


def _sqlite(patches: Patches, view: View, module: types.ModuleType) -> None:
    """Where it is a part of Python's own library, its calls are not taken."""
    real = module.connect

    def on_disk(path: str) -> str:
        return native_path(view, path) if path and not view.closed else path

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        name = os.fsdecode(database)
        if name == ":memory:":
            return real(database, *args, **kwargs)
        if kwargs.get("uri") and name.startswith("file:"):
            path, mark, query = name[5:].partition("?")
            if path == ":memory:" or "mode=memory" in query:
                return real(database, *args, **kwargs)
            path = on_disk("/" + path.lstrip("/") if path[:1] == "/" else path)
            return real(f"file:{path}{mark}{query}", *args, **kwargs)
        return real(on_disk(name), *args, **kwargs)

    replace_by_name(patches, {id(real): connect})


def _numpy(patches: Patches, _view: View, module: types.ModuleType) -> None:
    # Its table of ways to open a file holds the original `open`.
    openers = getattr(module, "_file_openers", None)
    if isinstance(table := getattr(openers, "_file_openers", None), dict):
        now = lambda *args, **kwargs: open(*args, **kwargs)  # noqa: E731, PTH123, SIM115
        patches.set(openers, "_file_openers", table | {None: now})


def _wandb(patches: Patches, _view: View, module: types.ModuleType) -> None:
    real = module.init

    def init(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs | {"mode": "disabled"})

    patches.set(module, "init", init)
    patches.set(module, "login", lambda *args, **kwargs: True)


def _mlflow(patches: Patches, _view: View, module: types.ModuleType) -> None:
    module.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
    patches.set(module, "set_tracking_uri", lambda uri: None)


_ADAPTERS: dict[str, Callable[[Patches, View, types.ModuleType], None]] = {
    "sqlite3": _sqlite,
    "sqlite3.dbapi2": _sqlite,
    "numpy.lib._datasource": _numpy,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


def adapters(patches: Patches, view: View) -> dict[str, Adapter]:
    """What to adapt, by module name."""
    return {name: partial(adapt, patches, view) for name, adapt in _ADAPTERS.items()}
