"""What every kernel rule speaks: scratch memory in bytes, dtype sizes, small integer helpers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = Sequence[int]

MIB = 1 << 20

ITEMSIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
HALF = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True)
class Scratch:
    """Device memory that a kernel takes from the caching allocator without dispatching an operator.

    Sizes are requested bytes with `low <= bytes <= high`. `begin` and `end` are stages of the call,
    half-open: scratch of `[0, 1)` is gone before scratch of `[1, 2)` is requested. Stages begin
    after the operator's outputs were allocated.
    """

    name: str
    low: int
    bytes: int
    high: int
    begin: int = 0
    end: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.bytes <= self.high:
            raise ValueError(f"scratch {self.name}: {self.low}, {self.bytes}, {self.high}")


def exactly(name: str, nbytes: int, begin: int = 0, end: int = 1) -> Scratch:
    """Scratch whose size the source states."""
    return Scratch(name, nbytes, nbytes, nbytes, begin, end)


def numel(shape: Shape) -> int:
    return math.prod(shape)


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def itemsize(dtype: str) -> int:
    """Bytes of one element; `dtype` is a torch dtype's name, with or without `torch.`."""
    return ITEMSIZES[dtype.removeprefix("torch.")]


def version_tuple(version: str) -> tuple[int, int, int]:
    """`2.13.0+cu130` → (2, 13, 0). Parts that are not numbers end the reading."""
    parts: list[int] = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return (*parts, 0, 0, 0)[:3]  # type: ignore[return-value]
