"""What the code of a step names, and where it stores a name."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator

from memplan.runtime.compiled.lines import is_users_file


def is_of_user(thing: types.FunctionType | types.ModuleType) -> bool:
    """Whether it is code that the user wrote, not memplan's or a library that is installed."""
    if isinstance(thing, types.ModuleType):
        file = getattr(thing, "__file__", None)
        return (file is not None and is_users_file(file)) or thing is sys.modules["__main__"]
    return is_users_file(thing.__code__.co_filename)


def is_user_class(cls: type) -> bool:
    """Whether the user wrote it."""
    module = sys.modules.get(cls.__module__)
    return isinstance(module, types.ModuleType) and is_of_user(module)


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def names_in(code: types.CodeType) -> set[str]:
    """Globals and attributes that the code names."""
    return {name for part in codes_of(code) for name in part.co_names}


@functools.cache
def compares_types(code: types.CodeType) -> str:
    """`file:line` where the code, not that of functions within, may ask whether the type of a value
    is one of Python's numbers (`type(x) is float`); empty where it does not."""
    if "type" not in code.co_names or not _NUMBER_TYPES & {*code.co_names}:
        return ""
    line, asks = "", False
    for instruction in dis.get_instructions(code):
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        called = "NULL" in instruction.argrepr
        asks |= called and instruction.argval == "type"
        if instruction.argval in _NUMBER_TYPES and not called and instruction.positions:
            line = line or f"{code.co_filename}:{instruction.positions.lineno}"
    return line if asks else ""


_NUMBER_TYPES = frozenset({"float", "int", "bool", "complex"})


def line_of(code: types.CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


def stores(codes: Iterable[types.CodeType], name: str) -> str:
    """`file:line` of the first instruction that assigns to a global, a cell or an attribute of that
    name, or else that reads it; empty where no code does."""
    reads = ""
    for code in codes:
        for part in codes_of(code):
            for instruction in dis.get_instructions(part):
                if instruction.argval != name or not instruction.positions:
                    continue
                line = f"{part.co_filename}:{instruction.positions.lineno}"
                if instruction.opname in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"):
                    return line
                if instruction.opname.startswith("LOAD"):
                    reads = reads or line
    return reads
