"""High bounds for tensors whose size depends on an assumed mask.

A mask of unknown content is assumed to select every second element, but it may select all of them.
A tensor that was computed from it and has as many rows as it selects is recorded with a high bound:
the bytes that it would have if the mask selected everything. Rows may lie in any dimension, and be
joined to or merged with others. What is made from a number alone, as by `torch.zeros(len(kept))`,
has such rows where a size is a number of them that was seen before.

A tensor has such rows where one of the operator's inputs has them, as often as there: a channel
for each of as many weights is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_ROWS = "_memplan_rows"
_TIMES = "_memplan_times"
"""The number of dimensions of a storage that have each number of rows in `_ROWS`."""


class AssumedSizes:
    """Notes on storages, in the way of known values."""

    def __init__(self) -> None:
        self.any = False
        """Whether a mask was assumed."""
        self._now: dict[int, int] = {}
        """The most rows, by the number that is assumed, of what the inputs depend on."""
        self._times: dict[int, int] = {}
        """In how many dimensions a result may have so many rows."""
        self._merged: dict[int, int] = {}
        """What is in rows that are merged with another dimension."""
        self._of_weights: set[torch.Size] = set()
        self._numbers: dict[int, int] = {}
        """The most rows, by each number of them that the script has seen."""
        self._from_numbers = False
        """Whether the operator makes its results from numbers alone."""

    def number(self, assumed: int, most: int) -> None:
        """Note a number of rows that the script may read."""
        if 0 < assumed < most:
            self.any = True
            self._numbers[assumed] = max(most, self._numbers.get(assumed, 0))

    def note(self, mask: torch.Tensor, selected: int) -> None:
        """Note that a mask is assumed to select so many of its elements."""
        rows = _rows(mask)
        most = _most(mask, rows)
        if 0 < selected < most:
            self.number(selected, most)
            setattr(mask.untyped_storage(), _ROWS, {**rows, selected: most})

    def begin(
        self,
        inputs: Sequence[Any],
        of_weights: Iterable[torch.Size] = (),
        *,
        from_numbers: bool = False,
    ) -> None:
        """To be called before an operator runs on these inputs. `of_weights`: the shapes of its
        results that have a weight's rows (`gradient_shapes`). `from_numbers`: whether sizes come
        from its numbers, as they do where it has no inputs."""
        self._from_numbers = from_numbers or not inputs
        self._now, self._times, self._merged = {}, {}, {}
        self._of_weights = set(of_weights)
        alone = Counter[int]()
        for item in inputs:
            if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                for selected, most in _rows(item).items():
                    rows, times = _as_viewed(item, selected)
                    self._now[selected] = max(most, self._now.get(selected, 0))
                    self._now[rows] = max(rows // selected * most, self._now.get(rows, 0))
                    self._times[rows] = max(times, self._times.get(rows, 0))
                    if rows != selected:
                        self._merged[rows] = selected
                    alone[rows] += times > 0 and item.shape.count(rows) == 1
        for rows, count in alone.items():  # all pairs of two inputs' rows
            self._times[rows] = max(count, self._times[rows])

    def join(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        """Note that the operator joins these tensors in a dimension: the most rows add up."""
        sizes = [one.shape[dim] for one in tensors if one.shape != (0,)]
        most = sum(self._now.get(size, size) if self._times.get(size) else size for size in sizes)
        if most > sum(sizes):
            self._now[sum(sizes)] = max(most, self._now.get(sum(sizes), 0))
            self._times[sum(sizes)] = 1

    def selects(self, mask: torch.Tensor, selected: int) -> None:
        """Note that the operator finds so many elements in a mask that depends on an assumed
        one."""
        if self._now and selected:
            self._now.setdefault(selected, _most(mask, self._now))
            self._times[selected] = 1

    def high_bytes(self, made: torch.Tensor) -> int | None:
        """The high bound for a storage of the operator; None where it depends on no assumption."""
        if self._from_numbers:
            self._times = Counter(size for size in made.shape if size in self._numbers)
            self._now = {size: self._numbers[size] for size in self._times}
        if not self._now or made.shape in self._of_weights:
            return None
        storage = made.untyped_storage()
        has = Counter(self._times) & Counter(made.shape)
        within = Counter({part: has[rows] for rows, part in self._merged.items()})
        setattr(storage, _ROWS, self._now)
        setattr(storage, _TIMES, _times(made) | has | within)  # a view has what its base has
        high = storage.nbytes()
        for rows, times in has.items():
            high = high // rows**times * self._now[rows] ** times
            self.number(rows, self._now[rows])
        return high if has else None

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


def _times(tensor: torch.Tensor) -> Counter[int]:
    """The number of dimensions that have each number of rows."""
    found: Counter[int] | None = getattr(tensor.untyped_storage(), _TIMES, None)
    return found or Counter()


def _as_viewed(tensor: torch.Tensor, selected: int) -> tuple[int, int]:
    """The number of rows in a view of what has selected ones, more where another dimension is
    merged with theirs; and in how many of its dimensions."""
    times = _times(tensor)[selected]
    if selected in tensor.shape:
        expanded = (selected, 0) in zip(tensor.shape, tensor.stride(), strict=True)
        return selected, max(times, int(expanded))
    if times and tensor.nbytes == tensor.untyped_storage().nbytes():
        merged = [size for size in tensor.shape if size % selected == 0]
        return (min(merged), 1) if merged else (selected, 0)
    return selected, 0


def _most(mask: torch.Tensor, rows: dict[int, int]) -> int:
    """The most elements that it can select: more than it has, if it masks what another mask
    selected."""
    if mask.dim() and mask.shape[0] in rows:
        return mask.numel() // mask.shape[0] * rows[mask.shape[0]]
    return mask.numel()
