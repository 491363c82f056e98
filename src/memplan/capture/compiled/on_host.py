"""What the compilers compute while they compile: constants, on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OnHost(TorchDispatchMode):
    """Computes on the host what is asked for on the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        moved = {name: _moved(item) for name, item in (kwargs or {}).items()}
        return func(*map(_moved, args), **moved)


def _moved(item: Any) -> Any:
    if isinstance(item, torch.device) and item.type == "cuda":
        return torch.device("cpu")
    return item
