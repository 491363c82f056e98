"""How a kernel rule sees an operator call, and the temporaries of the libraries that many share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from memplan.capturing.kernels.model import Scratch, Shape, ceil_div, exactly, itemsize, numel

INDEX_BYTES = 8
_ALIGNING = 2 * 256 - 1


@dataclass(frozen=True)
class OpCall:
    """One operator call. `shapes`, `dtypes` and `strides` have one entry a tensor argument, lists
    of tensors flattened, in the order of the schema; `args` holds the other arguments by name."""

    op: str
    shapes: Sequence[Shape]
    dtypes: Sequence[str]
    strides: Sequence[Sequence[int]] = ()
    """Empty: all contiguous."""
    out_shapes: Sequence[Shape] = ()
    args: Mapping[str, object] = field(default_factory=dict)
    capability: tuple[int, int] = (8, 0)
    sm_count: int = 108
    deterministic: bool = False

    @property
    def shape(self) -> Shape:
        return self.shapes[0]

    @property
    def count(self) -> int:
        return numel(self.shapes[0])

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtypes[0])

    def integer(self, name: str, default: int) -> int:
        value = self.args.get(name)
        return value if isinstance(value, int) else default

    def dims(self) -> Sequence[int] | None:
        """An int or a list of them; None for all dimensions."""
        value = self.args.get("dim")
        if isinstance(value, int) and not isinstance(value, bool):
            return [value]
        if isinstance(value, Sequence):
            return [int(item) for item in value]
        return None


Rule: TypeAlias = Callable[[OpCall], list[Scratch]]


def contiguous_copies(call: OpCall, *places: int) -> list[Scratch]:
    """What a kernel copies, while it runs, of tensor arguments that are not contiguous."""
    return [
        exactly("operand's copy", numel(call.shapes[place]) * itemsize(call.dtypes[place]))
        for place in places
        if call.strides and not _contiguous(call.shapes[place], call.strides[place])
    ]


def _contiguous(shape: Shape, strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def radix_sort_temporary(items: int, key: int, value: int) -> Scratch:
    """The temporary of cub's `DeviceRadixSort::SortPairs` between separate buffers: a second
    copy of keys and values, one histogram a tile of the look-back, and the bins. Two boundaries of
    256 bytes are left open to chance, as on an H200 with CUDA 13.0."""
    pairs = items * (key + value)
    look_back = ceil_div(items, 4096) * 256 * 4
    measured = pairs + look_back + 16 * 1024 + _ALIGNING
    return Scratch("sort temporary", pairs, measured, pairs + 4 * look_back + 128 * 1024)


def small_temporary(name: str, begin: int = 0) -> Scratch:
    """A temporary of cub's reduce, scan or select: one state a tile, at least one block."""
    return Scratch(name, 1, 1024, 64 * 1024, begin=begin, end=begin + 1)


def scan_temporary(items: int, name: str = "scan temporary", begin: int = 0) -> Scratch:
    """cub's `DeviceScan`: 8 or 16 bytes a tile of 1,920 items or so. Measured on an H200 with CUDA
    13.0: 1,023 bytes for 1,000 items, 1,279 for 8,192, for 100,000 and for 3,216,448."""
    tiles = ceil_div(items, 1024)
    measured = (512 if items <= 4096 else 768) + _ALIGNING
    return Scratch(name, 1, measured, 32 * tiles + 4096, begin, begin + 1)
