"""Groups of dropped values, and the handles that autograd's graph holds in place of tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch

from memplan.runtime.tape.replay import EmptiedError, can_be_made, recompute
from memplan.runtime.tape.values import View, version_of
from memplan.types.errors import RecomputeError

_one_at_a_time = threading.RLock()
"""Backward runs in a thread for each device: two replays would draw from one generator by turns."""


class Handle:
    """Stands for a saved tensor whose value was dropped."""

    __slots__ = ("__weakref__", "checksum", "group", "view")

    def __init__(self, view: View, group: Group, checksum: torch.Tensor | None) -> None:
        self.view = view
        self.group = group
        self.checksum = checksum
        """Checksum of the tensor when it was dropped; None if it is not to be checked."""

    def get(self) -> torch.Tensor:
        """See `Group.tensor`."""
        return self.group.tensor(self)


class Group:
    """Values of one call that are dropped and recomputed together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handles: WeakSet[Handle] = WeakSet()

    def tensor(self, handle: Handle) -> torch.Tensor:
        """The tensor that `handle` stands for; recomputes the group where it must.

        Raises RecomputeError where the result differs from what forward had, or where an input of
        the recomputation was modified in between, and RuntimeError where an earlier backward
        modified the result.
        """
        value = handle.view.value
        with _one_at_a_time:
            if value.base is None:
                waiting = {other.view.value for other in self.handles}
                targets = [v for v in waiting if v.base is None]
                try:
                    recompute(self.name, targets)
                except EmptiedError:  # of another value, it may be
                    others = [v for v in targets if v is not value and can_be_made(v)]
                    recompute(self.name, [value, *others])
                for other in list(self.handles):
                    self._check(other)
        base = value.base
        assert base is not None
        if value.modified():
            raise modified_error(base, value.version, handle.view.size)
        return handle.view.on(base)

    def _check(self, handle: Handle) -> None:
        if handle.checksum is None or handle.view.value.base is None:
            return
        with torch.no_grad():
            now = checksum_of(handle.view.on(handle.view.value.base))
        expected, handle.checksum = handle.checksum, None
        if now is not None and int(now) != int(expected):
            raise RecomputeError(
                f"recomputing {self.name} gave other values than its forward pass "
                f"({handle.view.dtype} of shape {list(handle.view.size)})",
                "an operator in it is not deterministic or writes where PyTorch cannot see it; "
                "run without the plan, and please report the model",
            )


class SavedTensor:
    """A tensor that is kept for backward as it is, and the check that nobody changed it."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version

    def get(self) -> torch.Tensor:
        """Raises RuntimeError, as autograd itself would, when it was modified in place."""
        if version_of(self.tensor) != self.version:
            raise modified_error(self.tensor, self.version, self.tensor.shape)
        return self.tensor


class SavedWrapper:
    """A tensor that holds others, such as a DTensor: these are saved, and it is made anew."""

    __slots__ = (
        "_context",
        "_kind",
        "_others",
        "_saved",
        "_size",
        "_stride",
        "_version",
        "_witness",
    )

    def __init__(
        self, tensor: Any, context: Any, held: dict[str, Any], saved: dict[str, Any]
    ) -> None:
        """`context`, `held`: what `__tensor_flatten__` tells of. `saved`: of what is held, what
        gives each tensor by `get()`."""
        self._kind = type(tensor)
        self._context, self._saved = context, saved
        self._others = {name: one for name, one in held.items() if name not in saved}
        self._size, self._stride = tensor.size(), tensor.stride()
        self._version = version_of(tensor)
        self._witness: Any = tensor.detach()
        for name in saved:  # it has the version counter, and is not to keep their memory
            setattr(self._witness, name, None)

    def get(self) -> torch.Tensor:
        """Raises RuntimeError, as autograd itself would, when it was modified in place."""
        if version_of(self._witness) != self._version:
            raise modified_error(self._witness, self._version, self._size)
        inner = self._others | {name: saved.get() for name, saved in self._saved.items()}
        made: torch.Tensor = self._kind.__tensor_unflatten__(
            inner, self._context, self._size, self._stride
        )
        return made.detach()


def modified_error(tensor: torch.Tensor, version: int, shape: tuple[int, ...]) -> RuntimeError:
    """An error in autograd's words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(shape)}] is at version {tensor._version}; "
        f"expected version {version} instead."
    )


_PIECES, _SHORTEST, _LONGEST = 16, 2**10, 2**18
"""A tensor is summed in so many pieces, of so many elements each: the check runs while memory is
scarce, and takes 16 bytes for an element of a piece."""
_ODD = 1_000_003
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A sum of the tensor's elements read as integers, weighted by place, so that rows in another
    order are noticed. Exact, modulo 2^64, and the same in every order of summation."""
    if tensor.numel() == 0 or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integer = _INTEGERS.get(tensor.element_size())
    if integer is None:
        return None
    most = min(max(tensor.numel() // _PIECES, _SHORTEST), _LONGEST)
    places = torch.arange(1, min(tensor.numel(), most) + 1, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in _pieces(_as_stored(tensor.view(integer)), most):
        flat = piece.reshape(-1)
        total = total * _ODD + (places[: len(flat)] * flat).sum()
    return total


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The dimensions in the order of their strides, in one where there are no gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    tensor = tensor.permute(order)
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def _pieces(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    if tensor.numel() <= most:
        yield tensor
        return
    rows = max(1, len(tensor) * most // tensor.numel())
    for part in tensor.split(rows) if len(tensor) > 1 else (tensor[0],):
        yield from _pieces(part, most)
