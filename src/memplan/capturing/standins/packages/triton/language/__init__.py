"""Types and constants of kernels that host code compares and computes with. Kernels are never run,
so what the other names do does not matter: each is a `DeviceName`."""

from __future__ import annotations

import operator
import re
from typing import Any

from memplan.capturing.standins.finder import DeviceName


class dtype:  # noqa: N801
    """A type of elements."""

    def __init__(self, name: str) -> None:
        self.name = name
        digits = re.search(r"\d+", name)
        self.primitive_bitwidth = int(digits.group()) if digits else 0
        self.itemsize = max(self.primitive_bitwidth // 8, 1)

    def __repr__(self) -> str:
        return f"triton.language.{self.name}"

    def __getattr__(self, name: str) -> Any:
        return getattr(DeviceName(repr(self)), name)


_NAMES = (
    "void int1 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "float8e4nv float8e5 float8e4b8 float8e5b16"
)
for _name in _NAMES.split():
    globals()[_name] = dtype(_name)


class constexpr:  # noqa: N801
    """A constant known when a kernel is compiled."""

    def __init__(self, value: Any = None) -> None:
        self.value = getattr(value, "value", value)

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"

    def __index__(self) -> int:
        return int(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __hash__(self) -> int:
        return hash(self.value)


def _computes(function: Any, swapped: bool) -> Any:
    def compute(self: constexpr, *other: Any) -> constexpr:
        values = [self.value, *(getattr(item, "value", item) for item in other)]
        return constexpr(function(*reversed(values)) if swapped else function(*values))

    return compute


_BINARY = "add sub mul truediv floordiv mod pow lshift rshift and or xor"
_OTHERS = "neg pos invert lt le gt ge eq ne"
for _name in _BINARY.split():
    _function = getattr(operator, f"__{_name}__")
    setattr(constexpr, f"__{_name}__", _computes(_function, False))
    setattr(constexpr, f"__r{_name}__", _computes(_function, True))
for _name in _OTHERS.split():
    setattr(constexpr, f"__{_name}__", _computes(getattr(operator, f"__{_name}__"), False))


class tensor:  # noqa: N801
    """Only used in annotations."""
