"""Runs a user's program as `python SCRIPT` would run it."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Literal, NoReturn

_MEMPLAN = str(Path(__file__).parents[2])


def run_program(kind: Literal["script", "module"], name: str, argv: tuple[str, ...]) -> None:
    """Run it to its end; whatever it raises passes through. A script's `__main__` stays when it has
    ended: its threads and exit handlers go on, and may pickle."""
    sys.argv = [name, *argv]
    if kind == "module":
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).resolve().parent))
        _run_script(Path(name).absolute())


def exit_with(real: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """Replaces `os._exit` while a program runs: the program ends as by `sys.exit`, because it is
    this process. Its forked children, and memplan itself, end as they ask."""
    own = os.getpid()

    def exit_(status: int) -> NoReturn:
        if os.getpid() != own or sys._getframe(1).f_code.co_filename.startswith(_MEMPLAN):
            real(status)
        raise SystemExit(status)

    return exit_


def _run_script(path: Path) -> None:
    if zipfile.is_zipfile(path):
        runpy.run_path(str(path), run_name="__main__")
        return
    # That would take `__main__` away at its end, and set sys.argv[0] to the whole path.
    code = _compiled(path)
    main = ModuleType("__main__")
    vars(main).update(
        __file__=str(path),
        __loader__=SourceFileLoader("__main__", str(path)),
        __builtins__=builtins,
        __cached__=None,
        __annotations__={},
    )
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _compiled(path: Path) -> CodeType:
    with io.open_code(str(path)) as file:
        return SourceFileLoader("__main__", str(path)).source_to_code(file.read(), str(path))
