"""Whose code a file is: the job's own, or a library's."""

from __future__ import annotations

import functools
import importlib.util
import sys
import sysconfig
from pathlib import Path

_PACKAGES = {"site-packages", "dist-packages"}


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a source file, by the path that its code objects have, is of a library: of the
    standard library, memplan or PyTorch, of any environment's packages or the user's own (`pip
    install --user`), or in a folder on Python's path that pip has installed into (`--target`).

    The script's own folder is none of these, whatever was installed there.
    """
    if file.startswith("<"):
        return file.startswith("<frozen")
    path = Path(file).resolve()
    return (
        not _PACKAGES.isdisjoint(path.parts)
        or any(path.is_relative_to(folder) for folder in _libraries())
        or any(_has_packages(folder) for folder in sys.path[1:] if path.is_relative_to(folder))
    )


@functools.cache
def _libraries() -> tuple[Path, ...]:
    torch = importlib.util.find_spec("torch")
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    folders += [str(Path(__file__).parents[1])]
    if torch is not None and torch.origin is not None:
        folders += [str(Path(torch.origin).parent)]
    return tuple(Path(folder).resolve() for folder in folders)


@functools.cache
def _has_packages(folder: str) -> bool:
    """Whether pip keeps records there of what it has installed."""
    return bool(folder) and any(Path(folder).glob("*.dist-info"))
