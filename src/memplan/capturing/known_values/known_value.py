"""The content of one fake storage, computed already or on request.

Most known values are never asked for: masks, positions, constants of a million elements, which each
layer makes anew. So computations with them are deferred. A chain of deferred computations keeps its
inputs alive, so its length is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LONGEST_CHAIN = 16
ALIKE = "_memplan_alike"
"""Marks a real storage that was computed as if all ranks had contributed the same."""

Place = tuple[int, "torch.Size", tuple[int, ...]]
"""The place of a tensor in a storage: offset, shape, stride."""


class KnownValue:
    """The content of a fake storage; another one replaces it in a write that is not in place."""

    __slots__ = ("_alike", "_find", "_storage", "borrowed", "chain", "lent")

    def __init__(
        self,
        storage: torch.UntypedStorage | None = None,
        find: Callable[[], torch.UntypedStorage | None] | None = None,
        *,
        chain: int = 0,
        borrowed: bool = False,
    ) -> None:
        self._storage = storage
        self._find = find
        self._alike = False
        self.chain = chain
        """Number of deferred computations in a chain behind it."""
        self.borrowed = borrowed
        """Whether the real storage is the script's, which may write to it."""
        self.lent = False
        """Whether a deferred computation reads it, so that it must not be written in place."""

    def __bool__(self) -> bool:
        return self._find is not None or self._storage is not None

    @property
    def alike(self) -> bool:
        """Whether it was computed as if all ranks had contributed the same."""
        return self._alike or getattr(self._storage, ALIKE, False)

    @alike.setter
    def alike(self, value: bool) -> None:
        self._alike = value

    @property
    def put_off(self) -> bool:
        """Whether its computation is still deferred."""
        return self._find is not None

    def storage(self) -> torch.UntypedStorage | None:
        """The real storage; None if the content is not known after all."""
        if self._find is not None:
            find, self._find = self._find, None
            self._storage, self.chain = find(), 0
        return self._storage

    def tensor(self, dtype: torch.dtype, place: Place) -> torch.Tensor | None:
        """The part of it that a tensor sees; shares the storage."""
        storage = self.storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *place)

    def own(self) -> KnownValue:
        """Content that may be written in place: this, or a copy."""
        storage = self.storage() if self.lent else None
        if storage is None:
            return self
        copy = KnownValue(storage.clone())
        copy.alike = self.alike
        return copy


class Computation:
    """A deferred operator on known values."""

    def __init__(
        self,
        run: Callable[[Any], Any],
        inputs: list[tuple[KnownValue, torch.dtype, Place]],
    ) -> None:
        """`run` is called with the inputs as real tensors, at most once."""
        self._run: Callable[[Any], Any] | None = run
        self._inputs = inputs
        self._result: Any = None
        self.chain = 1 + max((value.chain for value, _, _ in inputs), default=0)
        self.alike = any(value.alike for value, _, _ in inputs)
        for value, _, _ in inputs:
            value.lent = True

    @staticmethod
    def possible(inputs: list[KnownValue]) -> bool:
        """Whether an operator may be deferred: nobody writes its inputs, and the chain is short."""
        return all(not value.borrowed and value.chain < _LONGEST_CHAIN for value in inputs)

    def result(self) -> Any:
        """The result of the operator; None if an input is not known after all, or if it fails."""
        if self._run is not None:
            run, self._run = self._run, None
            inputs = [value.tensor(dtype, place) for value, dtype, place in self._inputs]
            self._inputs = []
            if all(tensor is not None for tensor in inputs):
                self._result = run(inputs)
        return self._result


def laid_out(
    value: torch.Tensor, dtype: torch.dtype, place: Place, nbytes: int
) -> torch.UntypedStorage | None:
    """A storage of `nbytes` with `value` at a place: that of `value` itself if it fits. None if the
    type or shape differs."""
    offset, shape, stride = place
    if value.dtype != dtype or value.shape != shape or value.layout is not torch.strided:
        return None
    storage = value.untyped_storage()
    same_layout = value.stride() == stride and value.storage_offset() == offset
    if same_layout and storage.nbytes() >= nbytes:
        return storage
    made = torch.zeros(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
    torch.empty(0, dtype=dtype, device="cpu").set_(made, *place).copy_(value)
    return made
