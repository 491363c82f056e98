"""Keeps modules on the path that they take without a recorder.

The fast paths of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` (other kernels, other
bits) are for tensors that nobody overrides functions of; a mode of Python functions, which the
recorder needs, counts as somebody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from memplan.runtime.compiled.patching import Patches


@contextmanager
def fast_paths() -> Iterator[None]:
    """Enter it before the recorder's modes."""
    patches = Patches()
    if not _get_current_function_mode_stack():
        patches.replace(torch.overrides, "has_torch_function", _is_overridden)
    try:
        yield
    finally:
        patches.undo()


def _is_overridden(tensors: Iterable[Any]) -> bool:
    """`torch.overrides.has_torch_function`, but for modes."""
    plain = torch._C._disabled_torch_function_impl
    return any(
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        and getattr(type(tensor), "__torch_function__", plain) is not plain
        for tensor in tensors
    )
