"""Values assumed where they depend on data: a router's choice, a threshold's mask.

`balanced` spreads choices evenly over the options and keeps half of a mask; `worst` sends
everything to the same options and keeps the whole mask.
"""

from __future__ import annotations

import torch


def assumed_topk(shape: torch.Size, options: int, dim: int, routing: str) -> torch.Tensor:
    """Indices of shape `shape` into `options` choices along `dim`; distinct along `dim`."""
    dim %= len(shape)
    chosen = shape[dim]
    rank = torch.arange(chosen).view([-1 if axis == dim else 1 for axis in range(len(shape))])
    if routing == "worst":
        return rank.expand(shape).contiguous()
    rows = [1 if axis == dim else size for axis, size in enumerate(shape)]
    count = 1
    for size in rows:
        count *= size
    row = torch.arange(count).view(rows)
    return ((row * chosen + rank) % max(options, 1)).expand(shape).contiguous()


def assumed_mask(shape: torch.Size, routing: str) -> torch.Tensor:
    """A boolean mask of `shape`."""
    mask = torch.ones(shape, dtype=torch.bool)
    if routing == "balanced":
        mask.view(-1)[1::2] = False
    return mask
