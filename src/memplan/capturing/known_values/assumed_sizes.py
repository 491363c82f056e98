"""High bounds for tensors whose size depends on an assumed mask.

A mask of unknown content is assumed to select every second element, but it may select all of them.
A tensor that was computed from it and has as many rows as it selects is recorded with a high bound:
the bytes that it would have if the mask selected everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_ROWS = "_memplan_rows"


class AssumedSizes:
    """Notes on storages, in the way of known values."""

    def __init__(self) -> None:
        self.any = False
        """Whether a mask was assumed."""
        self._now: dict[int, int] = {}
        self._of_weights: set[torch.Size] = set()

    def note(self, mask: torch.Tensor, selected: int) -> None:
        """Note that a mask is assumed to select so many of its elements."""
        rows = _rows(mask)
        most = _most(mask, rows)
        if 0 < selected < most:
            self.any = True
            setattr(mask.untyped_storage(), _ROWS, {**rows, selected: most})

    def begin(self, inputs: Iterable[Any], of_weights: Iterable[torch.Size] = ()) -> None:
        """To be called before an operator runs on these inputs. `of_weights`: the shapes of its
        results that have a weight's rows (`gradient_shapes`)."""
        self._now, self._of_weights = {}, set(of_weights)
        for item in inputs:
            if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                for selected, most in _rows(item).items():
                    self._now[selected] = max(most, self._now.get(selected, 0))

    def selects(self, mask: torch.Tensor, selected: int) -> None:
        """Note that the operator finds so many elements in a mask that depends on an assumed
        one."""
        if self._now and selected:
            self._now.setdefault(selected, _most(mask, self._now))

    def high_bytes(self, made: torch.Tensor) -> int | None:
        """The high bound for a storage of the operator; None where it depends on no assumption."""
        if not self._now or made.shape in self._of_weights:
            return None
        storage = made.untyped_storage()
        setattr(storage, _ROWS, self._now)
        if not made.dim() or made.shape[0] not in self._now:
            return None
        return storage.nbytes() // made.shape[0] * self._now[made.shape[0]]

    def forget(self, gradient: torch.Tensor) -> None:
        """Note that a tensor has the shape of its parameter, whatever it was computed from."""
        if self.any and gradient.layout is torch.strided:
            setattr(gradient.untyped_storage(), _ROWS, {})


def gradient_shapes(func: Any, args: Sequence[Any]) -> list[torch.Size]:
    """The shapes of an operator's results that are gradients of weights. A weight may have as many
    rows as a mask is assumed to select."""
    if func is aten.convolution_backward.default:
        return [args[2].shape, args[2].shape[:1]]
    if func is aten.mm.default and args[0].stride(0) < args[0].stride(1):  # it sums over rows
        return [torch.Size((args[0].shape[0], args[1].shape[1]))]
    return []


def _rows(tensor: torch.Tensor) -> dict[int, int]:
    """The most rows that there can be, by the number of rows that a mask is assumed to select."""
    found: dict[int, int] = getattr(tensor.untyped_storage(), _ROWS, {})
    return found


def _most(mask: torch.Tensor, rows: dict[int, int]) -> int:
    """The most elements that it can select: more than it has, if it masks what another mask
    selected."""
    if mask.dim() and mask.shape[0] in rows:
        return mask.numel() // mask.shape[0] * rows[mask.shape[0]]
    return mask.numel()
