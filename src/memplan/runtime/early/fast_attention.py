"""PyTorch's attention modules in the backward pass, where a checkpoint runs them again.

In evaluation mode and without gradients they have a faster way, with other bits, that they do not
take while any function mode is active. That of early updates must not count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from memplan.runtime.early.watched import InBackward

_ASKS = ("torch.nn.modules.activation", "torch.nn.modules.transformer")


@contextmanager
def fast_attention() -> Iterator[None]:
    """As without `InBackward`."""
    real: Any = torch.overrides.has_torch_function

    def without_ours(arguments: Any) -> bool:
        if isinstance(_get_current_function_mode(), InBackward):
            with _pop_mode_temporarily():
                return without_ours(arguments)
        return bool(real(arguments))

    def has_torch_function(args: Iterable[Any]) -> bool:
        asks = sys._getframe(1).f_globals.get("__name__") in _ASKS
        return without_ours(args) if asks else bool(real(args))

    torch.overrides.has_torch_function = has_torch_function
    try:
        yield
    finally:
        torch.overrides.has_torch_function = real
