"""`torch.tensor([a, b])` of tensors: the constructors that read elements in C++, past every mode.

With elements on the device or without data they fail; then they are called again with what the
elements are known or assumed to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.patches.attributes import Patches


@contextmanager
def known_to_torchscript(patches: Patches) -> Iterator[None]:
    """A context manager in which TorchScript takes a replacement of a built-in function for the
    same operator: it knows operators by the identity of the Python object."""
    table = torch.jit._builtins._get_builtin_table()
    added = {}
    for owner, name, original in patches.originals():
        operator = table.get(id(original))
        if operator is not None:
            added[id(vars(owner)[name])] = operator
    table.update(added)
    try:
        yield
    finally:
        for key in added:
            del table[key]


def install(patches: Patches) -> None:
    """Patch the constructors until `patches.undo()`."""
    # The table that tells `with torch.device(…)` which functions it concerns holds the functions
    # themselves, and is made when it is first asked for: now, not from ours.
    with torch.device("cpu"):
        torch.empty(0)
    torch.jit._builtins._get_builtin_table()  # likewise TorchScript's
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, name, _reading_elements(getattr(torch, name), 0))
    patches.set(torch.Tensor, "new_tensor", _reading_elements(torch.Tensor.new_tensor, 1))


def _reading_elements(real: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The constructor whose argument number `position` may hold fake tensors in lists."""

    def construct(*args: Any, **kwargs: Any) -> Any:
        lift_before = torch._C._only_lift_cpu_tensors()  # the engine's threads have theirs
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            return build(*args, **kwargs)
        finally:
            torch._C._set_only_lift_cpu_tensors(lift_before)

    def build(*args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except RuntimeError:
            if len(args) <= position or not isinstance(args[position], (list, tuple)):
                raise
            numbers = _numbers(args[position])
            if numbers is args[position]:
                raise
        return real(*args[:position], numbers, *args[position + 1 :], **kwargs)

    construct.__name__ = real.__name__
    return construct


def _numbers(data: Any) -> Any:
    """The same nested lists with numbers in place of fake tensors; `data` itself where none is."""
    if isinstance(data, FakeTensor):
        return data.tolist()
    if not isinstance(data, (list, tuple)):
        return data
    items = [_numbers(item) for item in data]
    return data if all(new is old for new, old in zip(items, data, strict=True)) else items
