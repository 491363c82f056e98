"""Puts the stand-ins wherever the originals are known by name, and takes them out again."""

from __future__ import annotations

import _io
import builtins
import glob
import importlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memplan.capturing.patches.attributes import Patches, named_by_modules
from memplan.capturing.sandbox.files import (
    make_directory_functions,
    make_listings,
    make_open,
    make_readers,
    make_writers,
    named,
)
from memplan.capturing.sandbox.view import View

_OWN = "memplan.capturing.sandbox"
_KEEP = {"os", "posix", "_io", "io", "builtins", "_posixsubprocess"}
_CAPABILITIES = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")


def patch_files(patches: Patches, view: View) -> dict[int, Any]:
    """Send every path that goes through `open`, `os` and the import system to the view.

    Returns the stand-ins by the id of the original.
    """
    stand_ins: dict[int, Any] = {}
    tables = (
        make_readers(view),
        make_listings(view),
        make_directory_functions(view),
        make_writers(view),
    )
    for table in tables:
        for name, call in table.items():
            original = getattr(os, name)
            stand_in = stand_ins[id(original)] = named(view, call, original)
            _announce(patches, original, stand_in)
            patches.set(os, name, stand_in)
    open_ = stand_ins[id(_io.open)] = named(view, make_open(view), _io.open)
    patches.set(builtins, "open", open_)
    patches.set(io, "open", open_)
    patches.set(shutil, "_use_fd_functions", False)
    _patch_imports(patches, view)
    _patch_globber(patches, stand_ins)
    replace_by_name(patches, stand_ins)
    return stand_ins


def _announce(patches: Patches, original: Any, stand_in: Any) -> None:
    """Let the stand-in be found in the sets that say what a function of `os` supports."""
    for name in _CAPABILITIES:
        supported = getattr(os, name)
        if original in supported:
            patches.set(os, name, supported | {stand_in})


class _ImportIO:
    """What the import system uses of `io`: reading a module's source and byte code."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(_io, name)

    def open_code(self, path: str) -> Any:
        return _io.open_code(self._view.reading(path))

    def FileIO(self, file: Any, mode: str = "r") -> Any:  # noqa: N802
        if isinstance(file, int):
            return _io.FileIO(file, mode)
        return _io.FileIO(self._view.reading(file), mode)


def _patch_imports(patches: Patches, view: View) -> None:
    # The import system holds the C modules directly; modules that a script writes and then imports
    # (a model's own code from a hub, for one) are found through it.
    external = sys.modules["_frozen_importlib_external"]
    patches.set(external, "_os", os)
    patches.set(external, "_io", _ImportIO(view))
    importlib.invalidate_caches()


def _patch_globber(patches: Patches, stand_ins: dict[int, Any]) -> None:
    globber = getattr(glob, "_StringGlobber", None)  # Python 3.13: pathlib's own copies.
    for name, value in list(vars(globber).items()) if globber else []:
        stand_in = stand_ins.get(id(getattr(value, "__func__", None)))
        if stand_in is not None:
            patches.set(globber, name, staticmethod(stand_in))


def _any_module(_name: str, _module: object) -> bool:
    return True


def replace_by_name(
    patches: Patches,
    stand_ins: dict[int, Any],
    which: Callable[[str, object], bool] = _any_module,
) -> None:
    """Replace what modules, of which `which(name, module)`, took by `from os import …`;
    `stand_ins` by the id of the original. Within `in_one_pass`, that is done at its end."""
    if patches.gathered is not None:
        patches.gathered |= stand_ins
        return
    for module, attribute, stand_in in named_by_modules(
        stand_ins,
        lambda name, module: (
            name not in _KEEP and not name.startswith(_OWN) and which(name, module)
        ),
    ):
        patches.set(module, attribute, stand_in)


@contextmanager
def in_one_pass(patches: Patches) -> Iterator[None]:
    """Have the modules looked through once for all that is to be replaced by name."""
    gathered: dict[int, Any] = {}
    patches.gathered = gathered
    yield
    patches.gathered = None
    replace_by_name(patches, gathered)


def release_by_name(
    originals: dict[int, Any], which: Callable[[str, object], bool] = _any_module
) -> None:
    """Undo, in modules imported meanwhile, what they took by name: keyed by the stand-in's id."""
    for module, attribute, original in named_by_modules(originals, which):
        setattr(module, attribute, original)
