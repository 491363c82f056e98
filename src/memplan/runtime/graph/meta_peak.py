"""The memory that operators on meta tensors would allocate."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdRef

from memplan.runtime.graph.program import tensors


class MetaPeak(TorchDispatchMode):
    """Measures the peak of new storages that are alive at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[WeakIdRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.item):
            # Meta tensors have no values; sizes do not depend on them.
            return 1.0 if args[0].is_meta else func(*args)
        given = {one.untyped_storage()._cdata for one in tensors([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for one in tensors(result):
            if one.untyped_storage()._cdata not in given:
                self._alive[WeakIdRef(one.untyped_storage())] = storage_bytes(one)
        self._alive = {ref: size for ref, size in self._alive.items() if ref() is not None}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
