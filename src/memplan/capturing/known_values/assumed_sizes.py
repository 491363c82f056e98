"""How large those tensors can be whose size rests on an assumed mask.

A mask that nobody knows is taken to select every second element; it may select them all. What has
as many rows as the mask selects, and was computed from it, is recorded with the bytes that it would
then have as its high bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_ROWS = "_memplan_rows"


class AssumedSizes:
    """Notes hang on storages, as known values do."""

    def __init__(self) -> None:
        self.any = False
        """Whether a mask was assumed."""
        self._now: dict[int, int] = {}

    def note(self, mask: torch.Tensor, selected: int) -> None:
        """A mask is taken to select as many of its elements."""
        rows = _rows(mask)
        most = _most(mask, rows)
        if 0 < selected < most:
            self.any = True
            setattr(mask.untyped_storage(), _ROWS, {**rows, selected: most})

    def begin(self, inputs: Iterable[Any]) -> None:
        """An operator on these runs."""
        self._now = {}
        for item in inputs:
            if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                for selected, most in _rows(item).items():
                    self._now[selected] = max(most, self._now.get(selected, 0))

    def selects(self, mask: torch.Tensor, selected: int) -> None:
        """The operator that runs finds so many elements in a mask that rests on an assumed one."""
        if self._now and selected:
            self._now.setdefault(selected, _most(mask, self._now))

    def high_bytes(self, made: torch.Tensor) -> int | None:
        """The high bound for a storage that the operator made; None where its size depends on no
        assumption."""
        if not self._now:
            return None
        storage = made.untyped_storage()
        setattr(storage, _ROWS, self._now)
        if not made.dim() or made.shape[0] not in self._now:
            return None
        return storage.nbytes() // made.shape[0] * self._now[made.shape[0]]


def _rows(tensor: torch.Tensor) -> dict[int, int]:
    """How many rows are as many as a mask selects, and how many there can then be."""
    found: dict[int, int] = getattr(tensor.untyped_storage(), _ROWS, {})
    return found


def _most(mask: torch.Tensor, rows: dict[int, int]) -> int:
    """How many elements it can select; of a mask of what another one selected, more than it has."""
    if mask.dim() and mask.shape[0] in rows:
        return mask.numel() // mask.shape[0] * rows[mask.shape[0]]
    return mask.numel()
