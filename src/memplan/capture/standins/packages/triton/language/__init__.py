"""Names that kernels use. Kernels are never run, so what the names do does not matter; types and
constants that host code compares are distinct."""

from __future__ import annotations

from typing import Any


class dtype:  # noqa: N801
    """A type of elements."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"triton.language.{self.name}"


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

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(self.value)


class tensor:  # noqa: N801
    """Only named in annotations."""
