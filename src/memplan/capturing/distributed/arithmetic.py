"""Values after a collective, as if every rank had put in what this rank did.

Each function takes real tensors and gives real tensors; `None` stands for a value that nobody
knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Value = torch.Tensor | None
SUM, AVG, PRODUCT, PREMUL_SUM, BXOR = "SUM", "AVG", "PRODUCT", "PREMUL_SUM", "BXOR"


def reduced(value: Value, op: str, size: int) -> Value:
    """What `size` equal values come to; the greatest, the least, the mean are the value itself."""
    if value is None or op == PREMUL_SUM:
        return None
    if op == SUM:
        return value * size
    if op == PRODUCT:
        return value**size
    if op == BXOR:
        return value if size % 2 else torch.zeros_like(value)
    return value.clone()


def gathered(value: Value, size: int) -> Value:
    """`size` copies, one after the other, flat."""
    return None if value is None else value.reshape(-1).repeat(size)


def part(value: Value, rank: int, size: int) -> Value:
    """The rank's part of a flat value."""
    if value is None or value.numel() % size:
        return None
    return value.reshape(size, -1)[rank]


def exchanged(
    value: Value, rank: int, size: int, sends: Sequence[int], receives: Sequence[int]
) -> Value:
    """All-to-all along the first dimension: every other rank sends what this one sends to its own
    place, as many rows as the receiver expects. No split sizes: equal ones."""
    if value is None or not value.numel():
        return None
    rows = value.shape[0]
    sends = list(sends) or [rows // size] * size
    receives = list(receives) or [rows // size] * size
    own = value[sum(sends[:rank]) : sum(sends[: rank + 1])]
    if own.shape[0] == 0:
        return None if sum(receives) else value[:0]
    index = torch.cat([torch.arange(count) % own.shape[0] for count in receives])
    return own[index]
