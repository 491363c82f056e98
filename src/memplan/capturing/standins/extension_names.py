"""Functions of a package's compiled part: their rules, and the names of those without one."""

from __future__ import annotations

import importlib.machinery
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from memplan.capturing.standins.finder import VERSIONS, Unknown
from memplan.capturing.standins.rules import Call, Rule

_MODULES = {"transformer_engine": "transformer_engine_torch"}
_USED = r"\b{alias}\.(\w+)|\b(NVTE_\w+)"


@lru_cache
def mentioned(package: str) -> frozenset[str]:
    """What the installed package's own Python takes from its compiled part: each version has
    others, and a script that asks for one must hear what that version would say."""
    module = _MODULES[package]
    found = importlib.machinery.PathFinder.find_spec(package)
    names: set[str] = set()
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(errors="replace")
            if module in text:
                names.update(_names(text, module))
    return frozenset(names)


def _names(text: str, module: str) -> set[str]:
    aliases = {module, *re.findall(rf"import {module} as (\w+)", text)}
    used = re.findall(_USED.format(alias=f"(?:{'|'.join(aliases)})"), text)
    lists = re.findall(rf"from {module} import \(?([\w\s,]+)", text)
    return {name for pair in used for name in pair if name} | set(
        re.findall(r"\w+", " ".join(lists))
    )


class ExtensionFunction(Rule):
    """A function of a compiled part. What it makes is not differentiated: that is the business of
    the Python that calls it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.run(Call(), *args, **kwargs)


class Extension:
    """Collects the functions of one source file."""

    def __init__(self, module: str, source: str) -> None:
        self._module, self._source = module, source

    def __call__(self, function: Callable[..., Any]) -> ExtensionFunction:
        """A decorator: the rule of the function of that name."""
        return self.named(function.__name__, function)

    def named(self, name: str, function: Callable[..., Any]) -> ExtensionFunction:
        return ExtensionFunction(f"{self._module}.{name}", function, self._source)


def transformer_engine(files: str) -> Extension:
    """The functions of files of Transformer Engine's `pytorch/csrc/extensions`."""
    source = f"Transformer Engine {VERSIONS['transformer_engine']}, pytorch/csrc/extensions/{files}"
    return Extension("transformer_engine_torch", source)


def absent(package: str, name: str) -> Unknown:
    """What a name without a rule is. Raises AttributeError where the package itself does not know
    it: a script that asks hears what it would hear elsewhere."""
    module = _MODULES[package]
    if name.startswith("__") or name not in mentioned(package):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return Unknown(f"{module}.{name}")
