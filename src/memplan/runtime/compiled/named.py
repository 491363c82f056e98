"""The namespaces in which the names that a function's code uses are looked up."""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from memplan.runtime.compiled.code_lines import codes_of, is_of_user, names_in

_ALL = frozenset({"globals", "eval", "exec"})
"""They reach any global by a name that the code need not show."""


class Space(NamedTuple):
    """`names` are looked up in `holds`."""

    prefix: str
    """Before a name, for people: `config.`."""
    holds: dict[str, Any]
    names: list[str]
    of_user: bool
    """Whether it is a module that the user wrote."""


def spaces_of(function: types.FunctionType) -> Iterator[Space]:
    """Its globals, Python's built-in names, and modules that its names or its imports lead to."""
    names = names_in(function.__code__)
    own = function.__globals__
    every = names | own.keys() if _ALL & names else names
    here = [name for name in every if name in own and not _is_hidden(name)]
    yield Space("", own, here, True)
    builtin = vars(builtins)
    yield Space("", builtin, [n for n in names if n in builtin and n not in own], False)
    modules = {name: own[name] for name in names & own.keys()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            modules[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    modules |= _imported(function.__code__)
    seen: set[int] = set()
    for name, module in modules.items():
        if isinstance(module, types.ModuleType):
            yield from _of_module(name, module, names, seen)


def _is_hidden(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _of_module(
    name: str, module: types.ModuleType, names: set[str], seen: set[int]
) -> Iterator[Space]:
    if id(module) in seen:
        return
    seen.add(id(module))
    space = vars(module)
    here = [other for other in names if other in space]
    yield Space(f"{name}.", space, here, is_of_user(module))
    for other in here:
        if isinstance(space[other], types.ModuleType):
            yield from _of_module(f"{name}.{other}", space[other], names, seen)


@functools.cache
def _imports(code: types.CodeType) -> tuple[str, ...]:
    return tuple(
        str(instruction.argval)
        for part in codes_of(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname == "IMPORT_NAME"
    )


def _imported(code: types.CodeType) -> dict[str, Any]:
    """Modules that the code imports by itself, and their packages."""
    found = {}
    for name in _imports(code):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path in sys.modules:
                found[path] = sys.modules[path]
    return found
