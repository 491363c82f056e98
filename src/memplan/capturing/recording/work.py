"""What an operator computes and moves, from the shapes of its tensors: the inputs of a roofline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_OVERWRITE = frozenset(
    {
        "aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_",
        "aten::bernoulli_", "aten::random_", "aten::exponential_",
    }
)  # fmt: skip
"""Operators that do not read their first argument."""
_SHAPE_ONLY = frozenset(
    {
        "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like",
        "aten::randn_like", "aten::new_zeros", "aten::new_ones", "aten::new_full",
    }
)  # fmt: skip
"""Operators that look at their first argument's shape and not at its elements."""
_EMPTY = frozenset(
    {
        "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
        "aten::new_empty", "aten::new_empty_strided",
    }
)  # fmt: skip
_LOOK_UP = frozenset(
    {"aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::take"}
)
"""Operators that read no more of their first argument than they return."""
_UPDATE = {
    "aten::index_add_": 3,
    "aten::index_copy_": 3,
    "aten::index_put_": 2,
    "aten::_index_put_impl_": 2,
    "aten::scatter_": 3,
    "aten::scatter_add_": 3,
}
"""Operators that touch no more of their first argument than the argument at this position has."""


def _grouped_mm(a: Any, b: Any, *_args: Any, out_val: Any = None, **_kwargs: Any) -> int:
    """Every row of `a` meets one matrix of `b`; the reduced dimension is the last of `a`, and the
    groups divide the rows, the columns or the reduced dimension."""
    if a.dim() == 2 and b.dim() == 2:  # the groups divide the reduced dimension
        return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[1])
    rows = int(a.numel()) // int(a.shape[-1])
    columns = int(b.shape[-1])
    groups = int(a.shape[0]) if a.dim() == 3 and b.dim() == 2 else 1
    return 2 * rows * int(a.shape[-1]) * columns // groups


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **({aten._grouped_mm: _grouped_mm} if hasattr(aten, "_grouped_mm") else {}),
}


class Work:
    """Counts operations once for each operator and set of shapes."""

    def __init__(self) -> None:
        self._formulas: dict[Any, Callable[..., int] | None] = {}
        self._counted: dict[Any, int] = {}

    def flops(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """FLOPs by `torch.utils.flop_counter`; 0 for operators and shapes without a formula."""
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = self._formulas[func] = _FORMULAS.get(getattr(func, "_overloadpacket", None))
        if formula is None:
            return 0
        try:
            key = (func, *map(_key, args), *map(_key, kwargs.values()))
            counted = self._counted.get(key)
        except TypeError:  # something that has no hash
            return _count(formula, args, kwargs, result)
        if counted is None:
            counted = self._counted[key] = _count(formula, args, kwargs, result)
        return counted


def _key(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.shape
    return tuple(item) if isinstance(item, list) else item


def _count(formula: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    try:
        return max(int(formula(*args, **kwargs, out_val=result)), 0)
    except Exception:  # formulas assert what they expect, each in its way
        return 0


def moved_bytes(
    func: Any,
    args: tuple[Any, ...],
    inputs: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    mutated: Sequence[torch.Tensor],
) -> int:
    """Bytes that an operator reads and writes, as viewed: a slice of a storage counts with its own
    size. `inputs` are its arguments, those that it writes to as well; `mutated` are those that it
    writes to, and `made` what it returns besides."""
    name = func._schema.name
    if name in _EMPTY:
        return 0
    total = 0
    for tensor in inputs:
        total += extent(tensor)
    for tensor in made:
        total += extent(tensor)
    for tensor in mutated:
        total += extent(tensor)
    if name in _OVERWRITE or name in _SHAPE_ONLY:
        total -= extent(args[0])
    elif name in _LOOK_UP:
        total -= max(extent(args[0]) - sum(map(extent, made)), 0)
    elif name in _UPDATE:
        values = args[_UPDATE[name]] if len(args) > _UPDATE[name] else None
        if isinstance(values, torch.Tensor):
            total -= 2 * max(extent(args[0]) - extent(values), 0)
    return total


def extent(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; those that an expanded one repeats count once."""
    if 0 not in tensor.stride():
        return tensor.nbytes
    elements = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            elements *= size
    return elements


_LONGEST = 64
_NAMES: dict[torch.dtype, str] = {}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def describe(func: Any, args: tuple[Any, ...], flops: int) -> str:
    """An operator's positional arguments as text: what its kernel's time depends on beside bytes
    and FLOPs.

    Arguments are separated by spaces. A tensor is its sizes, its dtype and its layout, such as
    `8x3x224x224:float16:n`; float32 that tensor cores may round is `tf32`. Layouts: `c` contiguous,
    `t` the last two dimensions swapped, `n` channels last, `s` otherwise strided. A list of tensors
    is the number of them (`12*`), any other list its items in brackets without spaces, and all else
    as Python writes it; `-` stands for None and for what has no short text.
    """
    text = " ".join(map(_text, args))
    return text.replace(":float32:", ":tf32:") if flops and _rounds(func) else text


def _rounds(func: Any) -> bool:
    """Whether products of float32 are on tensor cores, by the settings that are in force now."""
    convolves = "convolution" in func._opname
    backends: Any = torch.backends
    settings = backends.cudnn.conv if convolves else backends.cuda.matmul
    return bool(settings.fp32_precision == "tf32")


def _text(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return _tensor(item)
    if item is None:
        return "-"
    if isinstance(item, (list, tuple)):
        tensors = sum(isinstance(one, torch.Tensor) for one in item)
        return f"{tensors}*" if tensors else _short("[" + ",".join(map(str, item)) + "]")
    return _short(str(item)) if isinstance(item, (bool, int, float)) else "-"


def _short(text: str) -> str:
    return text.replace(" ", "") if len(text) <= _LONGEST else "-"


def _tensor(tensor: torch.Tensor) -> str:
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        dtype = _NAMES[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
    return f"{'x'.join(map(str, tensor.shape))}:{dtype}:{_layout(tensor)}"


def _layout(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "c"
    shape, stride = tensor.shape, tensor.stride()
    if len(shape) in _CHANNELS_LAST and tensor.is_contiguous(
        memory_format=_CHANNELS_LAST[len(shape)]
    ):
        return "n"
    if len(shape) >= 2 and stride[-2] == 1 and stride[-1] >= shape[-2]:
        return "t"
    return "s"
