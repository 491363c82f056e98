"""The tensors among an operator's arguments and results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_NO_TENSOR = frozenset({type(None), bool, int, float, torch.dtype, torch.device})


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[FakeTensor], bool]:
    """The fake tensors among the arguments, and whether there is a real one too."""
    fakes: list[FakeTensor] = []
    real = False
    for item in (*args, *kwargs.values()) if kwargs else args:
        kind = type(item)
        if kind is _Tensor or kind is _Parameter:
            if item._fake_device is not None:
                fakes.append(item)
            else:
                real = True
        elif kind in _NO_TENSOR:
            continue
        elif isinstance(item, FakeTensor):  # a parameter of a package's own class
            fakes.append(item)
        elif isinstance(item, torch.Tensor):
            real = True
        elif isinstance(item, (list, tuple)):
            for inner in item:
                if isinstance(inner, FakeTensor):
                    fakes.append(inner)
                elif isinstance(inner, torch.Tensor):
                    real = True
    return fakes, real


def dressed_among(
    args: tuple[Any, ...], kwargs: dict[str, Any], fakes: list[FakeTensor], *, has_real: bool
) -> list[torch.Tensor]:
    """The tensors among the arguments that are of a class of the job's own."""
    tensors: list[torch.Tensor] = [*fakes]
    if has_real:
        tensors = flat([*args, *kwargs.values()], torch.Tensor)
    return [one for one in tensors if type(one) is not _Tensor and type(one) is not _Parameter]


def flat(result: Any, kind: type = FakeTensor) -> list[Any]:
    """The tensors of a result, those in nested lists too."""
    if isinstance(result, (list, tuple)):
        found: list[Any] = []
        for item in result:
            found.extend([item] if isinstance(item, kind) else flat(item, kind))
        return found
    return [result] if isinstance(result, kind) else []


def written_among(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type = FakeTensor
) -> Iterator[Any]:
    """The tensors that an operator writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        item = args[position] if position < len(args) else kwargs.get(argument.name)
        if isinstance(item, kind):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from (inner for inner in item if isinstance(inner, kind))


def without_out(func: Any) -> Any:
    """The overload that makes what `func` writes to its `out=` arguments; None if it has none."""
    arguments = func._schema.arguments
    taken = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    if len(taken) == len(arguments):
        return None
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        same = [(a.name, str(a.type)) for a in other._schema.arguments] == taken
        if same and not other._schema.is_mutable:
            return other
    return None
