"""The texts of `Ops.operands`, read back."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

ITEMSIZE = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "tf32": 4, "int32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2,
}  # fmt: skip
"""Bytes of an element; every other dtype has one."""


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    layout: str
    """`c` contiguous, `t` the last two dimensions swapped, `n` channels last, `s` other strides."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE.get(self.dtype, 1)

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


Argument: TypeAlias = Tensor | tuple[int, ...] | str
"""A tensor, a list of integers, or the text of anything else."""


def parsed(text: str) -> list[Argument]:
    """The arguments of an operator, in order; none for an empty text."""
    return [_argument(word) for word in text.split(" ")] if text else []


def _argument(word: str) -> Argument:
    if word.startswith("["):
        items = word[1:-1].split(",")
        if all(item.lstrip("-").isdigit() for item in items):
            return tuple(map(int, items))
        return word
    shape, colon, rest = word.partition(":")
    if not colon:
        return word
    dtype, _, layout = rest.partition(":")
    return Tensor(tuple(map(int, shape.split("x"))) if shape else (), dtype, layout)


def tensors(arguments: list[Argument]) -> list[Tensor]:
    return [item for item in arguments if isinstance(item, Tensor)]
