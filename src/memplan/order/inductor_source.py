"""Functions of PyTorch Inductor out of its source file, without importing Inductor.

The import takes seconds, starts with torch, and of all that only three functions are wanted, which
sort nodes and need nothing else. Where the file has them in another way than this expects, Inductor
is imported.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Functions = dict[str, Callable[..., Any]]


class _UnexpectedSourceError(Exception):
    pass


def inductor_functions(names: Sequence[str]) -> Functions:
    """Functions of `torch._inductor.memory` by name.

    Raises ImportError where there is no Inductor, AttributeError where it has none of that name.
    """
    if "torch._inductor.memory" not in sys.modules:
        try:
            return _from_source(names)
        except (OSError, SyntaxError, ValueError, ImportError, _UnexpectedSourceError):
            pass
    from torch._inductor import memory

    return {name: getattr(memory, name) for name in names}


def _from_source(names: Sequence[str]) -> Functions:
    """What else the functions name are standard modules, `OrderedSet` and plain settings."""
    torch = importlib.util.find_spec("torch")  # imports nothing
    if torch is None or not torch.submodule_search_locations:
        raise ImportError("there is no torch")
    folder = Path(torch.submodule_search_locations[0])
    tree = ast.parse((folder / "_inductor" / "memory.py").read_bytes())
    kept = [node for node in tree.body if _is_standard_import(node) or _defines(node, names)]
    space: dict[str, Any] = {
        "OrderedSet": _ordered_set(folder),
        "config": _settings(folder, [node for node in kept if isinstance(node, ast.FunctionDef)]),
        "__name__": __name__,  # a module that dataclasses can find
    }
    exec(compile(ast.Module(kept, []), str(folder / "_inductor" / "memory.py"), "exec"), space)
    for name in names:
        if name not in space or not _globals_of(space[name].__code__) <= {*space, *dir(builtins)}:
            raise _UnexpectedSourceError(name)
    return {name: space[name] for name in names}


def _is_standard_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name in sys.stdlib_module_names for alias in node.names)
    return (
        isinstance(node, ast.ImportFrom)
        and not node.level
        and node.module in sys.stdlib_module_names
    )


def _defines(node: ast.stmt, names: Sequence[str]) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in names


def _ordered_set(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location(
        "memplan_ordered_set", folder / "utils" / "_ordered_set.py"
    )
    if spec is None or spec.loader is None:
        raise _UnexpectedSourceError("OrderedSet")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OrderedSet


def _settings(folder: Path, functions: Sequence[ast.FunctionDef]) -> types.SimpleNamespace:
    """Of `torch._inductor.config`, what the functions ask for: literals."""
    wanted = {
        node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "config"
    }
    found = types.SimpleNamespace()
    for node in ast.parse((folder / "_inductor" / "config.py").read_bytes()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, value = node.target.id, node.value
            if name in wanted and isinstance(value, ast.Constant):
                setattr(found, name, value.value)
    if wanted != vars(found).keys():
        raise _UnexpectedSourceError("config")
    return found


def _globals_of(code: types.CodeType) -> set[str]:
    """Names that a function and those it defines look up outside."""
    return {
        str(instruction.argval)
        for inner in _codes(code)
        for instruction in dis.get_instructions(inner)
        if instruction.opname == "LOAD_GLOBAL"
    }


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
