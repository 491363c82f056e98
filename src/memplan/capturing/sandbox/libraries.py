"""Libraries that write or call out by themselves: each is adapted when it is, or gets, imported."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import Adapter
from memplan.capturing.sandbox.changes import native_path
from memplan.capturing.sandbox.patches import replace_by_name
from memplan.capturing.sandbox.view import View


def _on_disk(view: View, path: Any, write: bool, keep: bool = True) -> Any:
    """`path`, unless it is a path in the view: then where a native library must look for it."""
    if view.closed or not isinstance(path, (str, bytes, os.PathLike)):
        return path
    text = os.fsdecode(path)
    return native_path(view, text, write, keep) if text else path


def _sqlite(patches: Patches, view: View, module: types.ModuleType) -> None:
    real = module.connect

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        name = os.fsdecode(database)
        if name == ":memory:":
            return real(database, *args, **kwargs)
        if kwargs.get("uri") and name.startswith("file:"):
            path, mark, query = name[5:].partition("?")
            if path == ":memory:" or "mode=memory" in query:
                return real(database, *args, **kwargs)
            path = _on_disk(view, "/" + path.lstrip("/") if path[:1] == "/" else path, True)
            return real(f"file:{path}{mark}{query}", *args, **kwargs)
        return real(_on_disk(view, name, True), *args, **kwargs)

    replace_by_name(patches, {id(real): connect})


def _arrow(patches: Patches, view: View, module: types.ModuleType) -> None:
    def opener(real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            place = _on_disk(view, path, write=mode[0] != "r" or "+" in mode, keep=mode[0] != "w")
            return real(place, mode, *args, **kwargs)

        return opened

    for name in ("memory_map", "OSFile"):
        patches.set(module, name, opener(getattr(module, name)))


def _arrow_paths(patches: Patches, view: View, module: types.ModuleType) -> None:
    """Adapt what is read as a data set, as by `pandas.read_parquet`."""
    real: Any = module._resolve_filesystem_and_path

    def resolve(path: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(FileNotFoundError):  # one that is about to be written
            path = _on_disk(view, path, False)
        return real(path, *args, **kwargs)

    replace_by_name(patches, {id(real): resolve})


def _parquet(patches: Patches, view: View, module: types.ModuleType) -> None:
    real = module.ParquetWriter.__init__

    def init(self: Any, where: Any, *args: Any, **kwargs: Any) -> None:
        real(self, _on_disk(view, where, True, keep=False), *args, **kwargs)

    patches.set(module.ParquetWriter, "__init__", init)


def _numpy(patches: Patches, _view: View, module: types.ModuleType) -> None:
    # Its table of ways to open a file holds the original `open`.
    openers = getattr(module, "_file_openers", None)
    if isinstance(table := getattr(openers, "_file_openers", None), dict):
        now = lambda *args, **kwargs: open(*args, **kwargs)  # noqa: E731, PTH123, SIM115
        patches.set(openers, "_file_openers", table | {None: now})


def _hdf5(patches: Patches, view: View, module: types.ModuleType) -> None:
    real = module.File.__init__

    def init(self: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        real(self, _on_disk(view, name, mode != "r", keep=mode != "w"), mode, *args, **kwargs)

    patches.set(module.File, "__init__", init)


def _profiler(patches: Patches, view: View, module: types.ModuleType) -> None:
    real = module.profile.export_chrome_trace

    def export_chrome_trace(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return real(self, _on_disk(view, path, True, keep=False), *args, **kwargs)

    patches.set(module.profile, "export_chrome_trace", export_chrome_trace)


def _wandb(patches: Patches, _view: View, module: types.ModuleType) -> None:
    real = module.init

    def init(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs | {"mode": "disabled"})

    patches.set(module, "init", init)
    patches.set(module, "login", lambda *args, **kwargs: True)


def _mlflow(patches: Patches, _view: View, module: types.ModuleType) -> None:
    module.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
    patches.set(module, "set_tracking_uri", lambda uri: None)


def _tokenizers(patches: Patches, view: View, module: types.ModuleType) -> None:
    """Its classes read and write their files in Rust, past the view. A model's own save, which
    writes a vocabulary into a directory, writes nothing: `tokenizer.json` holds it, too."""

    def place(one: Any) -> Any:
        return _on_disk(view, one, False) if isinstance(one, str) and Path(one).is_file() else one

    def reader(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: real(
            *map(place, args), **{name: place(one) for name, one in named.items()}
        )

    class AsNamed(type):
        """A model's class as modules name it: one of Rust's cannot be given a new constructor."""

        real: type

        def __call__(cls, *args: Any, **named: Any) -> Any:
            return reader(cls.real)(*args, **named)

        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, cls.real)

        def __getattr__(cls, name: str) -> Any:
            found = getattr(cls.real, name)
            return reader(found) if callable(found) else found

    def save(tokenizer: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return real_save(tokenizer, _on_disk(view, path, True, keep=False), *args, **kwargs)

    real_save, models = module.Tokenizer.save, module.models
    patches.set(module.Tokenizer, "save", save)
    patches.set(models.Model, "save", lambda *_, **__: [])
    for_pickle = lambda one: (getattr(models, type(one).__name__), (), one.__getstate__())  # noqa: E731
    patches.set(models.Model, "__reduce__", for_pickle)
    patches.set(module.Tokenizer, "from_file", staticmethod(reader(module.Tokenizer.from_file)))
    named = {one for one in vars(models).values() if isinstance(one, type)} - {models.Model}
    for real in named:
        known = {"real": real, "__module__": real.__module__}
        replace_by_name(patches, {id(real): AsNamed(real.__name__, (), known)})


_ADAPTERS: dict[str, Callable[[Patches, View, types.ModuleType], None]] = {
    "sqlite3": _sqlite,
    "sqlite3.dbapi2": _sqlite,
    "numpy.lib._datasource": _numpy,
    "pyarrow": _arrow,
    "pyarrow.fs": _arrow_paths,
    "pyarrow.parquet.core": _parquet,
    "h5py._hl.files": _hdf5,
    "torch.autograd.profiler": _profiler,
    "tokenizers": _tokenizers,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


def adapters(patches: Patches, view: View) -> dict[str, Adapter]:
    """What to adapt, by module name."""
    return {name: partial(adapt, patches, view) for name, adapt in _ADAPTERS.items()}
