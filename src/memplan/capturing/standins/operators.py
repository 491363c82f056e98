"""Rules as operators of PyTorch, for stand-ins whose packages register such operators: a compiler
traces the stand-in's Python and takes the operator as it is, as it does with the real package."""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.registry import _packet
from memplan.capturing.standins.rules import Call, Rule

_libraries: dict[str, torch.library.Library] = {}
"""By namespace; an operator lives as long as the library that defined it."""


class _Shapes(Call):
    """A call of which only the outputs' shapes are wanted: by a compiler, of symbols perhaps."""

    def workspace(self, nbytes: Any, low: Any = None, high: Any = None) -> torch.Tensor:
        """Nothing that anybody sees."""
        return torch.empty(nbytes, dtype=torch.uint8)


def operator_of(rule: Rule, schema: str) -> Any:
    """The operator `rule.name`, defined with `schema` unless its package is here; a capture gives
    what the rule gives."""
    namespace, _, name = rule.name.partition("::")
    packet = _packet(namespace, name)
    if packet is None:
        library = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        library.define(name + schema)

        def shapes(*args: Any, **kwargs: Any) -> Any:
            return rule.function(_Shapes(), *args, **kwargs)

        torch.library.register_fake(f"{namespace}::{name}", shapes, lib=library)
        packet = _packet(namespace, name)
    return packet.default
