"""Undoes what a dispatch mode itself changes about `linear`: its bias.

For an input that is not contiguous, PyTorch adds the bias into the product; under a mode, as a
recording is, it asks for another tensor (`isTensorSubclassLike` in `native/Linear.cpp`). That would
cost memory, and a plan made from a run without the mode would not find the op that it counts
(`capturing/parity/additions` shows it the same op).
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memplan.runtime.tape.storages import is_plain

ADD, ADD_INTO = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
SHAPE_PRODUCT = torch.ops.aten._unsafe_view.default
"""The last op of `matmul`."""


def goes_into_product(product: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether PyTorch itself adds to what it has just multiplied and nobody else holds. `product`:
    the key of that storage."""
    if kwargs or not all(isinstance(item, torch.Tensor) and is_plain(item) for item in args):
        return False
    if args[0].untyped_storage()._cdata != product or _counts(args) != unshared_counts():
        return False
    if torch.result_type(*args) != args[0].dtype:
        return False
    return bool(torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape)


def _counts(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """C++ references to the first argument and to its storage, and Python's."""
    tensor = args[0]
    return (
        tensor._use_count(),
        torch._C._storage_Use_Count(tensor.untyped_storage()._cdata),
        sys.getrefcount(tensor),
    )


class _Probe(TorchDispatchMode):
    """Notes the reference counts of what is added to."""

    seen: tuple[int, int, int] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is ADD:
            self.seen = _counts(args)
        return func(*args, **(kwargs or {}))


@cache
def unshared_counts() -> tuple[int, int, int] | None:
    """The reference counts of a product that only `linear` holds. They depend on how PyTorch passes
    arguments to Python, so they are measured. None if this PyTorch has no such addition."""
    with _disable_current_modes(), torch.no_grad(), torch._C.DisableTorchFunction():
        ones = torch.ones(2, 2, 2, device="cpu")
        probe = _Probe()  # type: ignore[no-untyped-call]
        with probe:
            linear(ones.transpose(0, 1), ones[0], ones[0, 0])
    seen: tuple[int, int, int] | None = probe.seen
    return seen
