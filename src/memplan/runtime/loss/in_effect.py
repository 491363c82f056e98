"""Puts a plan's part `loss` into effect: the heads it names give `Logits`. Below it, what may be
done to those without computing them whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from memplan.capturing.patches.attributes import Patches
from memplan.runtime.loss.logits import HANDLERS, Handler, Logits, deferred, then
from memplan.runtime.loss.rows import Autocast, Head
from memplan.runtime.tape.storages import is_plain
from memplan.types.plan import LossPart


class ChunkedLoss:
    """A context manager that acts on `torch.nn.functional.linear`, which `nn.Linear` calls. A head
    returns plain logits where gradients are off, in compiled code and in backward (a checkpointed
    block that runs again)."""

    def __init__(self, part: LossPart) -> None:
        self._heads = {(head.classes, head.features) for head in part.heads}
        self._rows = part.rows
        self._patches = Patches()
        self._plain: Any = None

    def __enter__(self) -> ChunkedLoss:
        self._plain = self._patches.set(torch.nn.functional, "linear", self._linear)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._patches.undo()

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling() and self._is_head(input, weight):
            return deferred(Head(weight, bias, self._rows), input)
        result: Tensor = self._plain(input, weight, bias)
        return result

    def _is_head(self, features: Tensor, weight: Tensor) -> bool:
        return (
            tuple(weight.shape) in self._heads
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1
            and is_plain(features)
            and is_plain(weight)
            and features.dim() > 1
            and features.numel() > self._rows * features.shape[-1]
        )


_ROW_WISE: tuple[Any, ...] = (
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.to,
    Tensor.neg,
    Tensor.__neg__,
    torch.neg,
    Tensor.tanh,
    torch.tanh,
    Tensor.div,
    Tensor.__truediv__,
    torch.div,
    torch.true_divide,
    Tensor.true_divide,
    Tensor.mul,
    Tensor.__mul__,
    Tensor.__rmul__,
    torch.mul,
)
_OF_ROWS: tuple[Any, ...] = (
    Tensor.split,
    torch.split,
    Tensor.chunk,
    torch.chunk,
    Tensor.narrow,
    torch.narrow,
    Tensor.unbind,
    torch.unbind,
    Tensor.select,
    torch.select,
)
_SIZES_FIRST = frozenset((Tensor.split, torch.split, Tensor.chunk, torch.chunk))


def _handles(*functions: Any) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return add


# Functions of each row by itself


@_handles(*_ROW_WISE)
def _element_wise(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Handles element-wise functions with only numbers and dtypes as further arguments."""
    allowed = (int, float, torch.dtype, torch.memory_format)
    if logits.of.classes_at >= 0 or not all(
        isinstance(item, allowed) for item in (*args, *kwargs.values())
    ):
        return NotImplemented
    return _then_row_wise(logits, lambda rows: func(rows, *args, **kwargs))


@_handles(F.log_softmax, torch.log_softmax, Tensor.log_softmax)
def _log_softmax(_func: Any, logits: Logits, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("_stacklevel", None)
    dtype = kwargs.pop("dtype", args[-1] if args and isinstance(args[-1], torch.dtype) else None)
    if kwargs or not _is_last(logits, dim):
        return NotImplemented
    return _then_row_wise(logits, lambda rows: torch.log_softmax(rows, -1, dtype))


def _then_row_wise(logits: Logits, function: Callable[[Tensor], Tensor]) -> Logits:
    autocast = Autocast(logits.device)

    def row_wise(rows: Tensor) -> Tensor:
        with autocast.again():
            return function(rows)

    return then(logits, row_wise, row_wise=row_wise)


# Views of rows


@_handles(Tensor.contiguous)
def _contiguous(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or logits.of.classes_at >= 0:
        return NotImplemented
    return then(logits, func, rows=logits.of.rows)


@_handles(Tensor.view, Tensor.reshape, torch.reshape)
def _reshape(func: Any, logits: Logits, *shape: Any, **kwargs: Any) -> Any:
    """The classes stay the last dimension."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        (shape,) = shape
    rows, classes = logits.of.rows, logits.shape[-1]
    if kwargs or logits.of.classes_at >= 0 or isinstance(shape, torch.dtype) or len(shape) < 2:
        return NotImplemented
    *lead, last = shape
    if last != classes and not (last == -1 and -1 not in lead):
        return NotImplemented
    try:
        rows = rows.reshape(*lead, rows.shape[-1])
    except RuntimeError:
        return NotImplemented
    return then(logits, lambda whole: func(whole, shape), rows=rows)


@_handles(Tensor.flatten, torch.flatten)
def _flatten(func: Any, logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if logits.of.classes_at >= 0 or end_dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    rows = logits.of.rows.flatten(start_dim, end_dim % logits.dim())
    return then(logits, lambda whole: func(whole, start_dim, end_dim), rows=rows)


@_handles(Tensor.__getitem__)
def _getitem(func: Any, logits: Logits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    dims = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
        for item in items
        if item is not None and item is not ...
    )
    last_is_whole = isinstance(items[-1], slice) and items[-1] == whole
    beyond = any(item is ... for item in items[:-1]) or dims == logits.dim()
    if logits.of.classes_at >= 0 or isinstance(index, list) or (beyond and not last_is_whole):
        return NotImplemented
    return then(logits, lambda whole: func(whole, index), rows=logits.of.rows[index])


@_handles(*_OF_ROWS)
def _parts(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Along another dimension than that of the classes, which the rows have at the same place."""
    at = 1 if func in _SIZES_FIRST else 0
    dim = kwargs.get("dim", args[at] if len(args) > at else 0)
    if logits.of.classes_at >= 0 or not isinstance(dim, int) or _is_last(logits, dim):
        return NotImplemented
    found = func(logits.of.rows, *args, **kwargs)
    if isinstance(found, Tensor):
        return then(logits, lambda whole: func(whole, *args, **kwargs), rows=found)
    return tuple(
        then(logits, functools.partial(_part, func, number, args, kwargs), rows=rows)
        for number, rows in enumerate(found)
    )


def _part(func: Any, number: int, args: Any, kwargs: Any, whole: Tensor) -> Tensor:
    parts: tuple[Tensor, ...] = func(whole, *args, **kwargs)
    return parts[number]


@_handles(Tensor.transpose, torch.transpose, Tensor.permute, torch.permute)
def _classes_second(func: Any, logits: Logits, *dims: Any, **kwargs: Any) -> Any:
    """`[batch, classes, length]`, as cross entropy takes it."""
    if kwargs or logits.of.classes_at >= 0 or logits.dim() != 3:
        return NotImplemented
    given = tuple(dims[0]) if len(dims) == 1 else dims
    if all(isinstance(dim, int) for dim in given):
        places = tuple(dim % 3 for dim in given)
        if places in ((0, 2, 1), (1, 2), (2, 1)):
            return then(logits, lambda whole: func(whole, *dims), rows=logits.of.rows, classes_at=1)
    return NotImplemented


# Reductions


@_handles(F.cross_entropy, F.nll_loss)
def _class_loss(
    func: Any,
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float | None = None,
) -> Any:
    smoothing = {} if label_smoothing is None else {"label_smoothing": label_smoothing}

    def rows_loss(rows: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = func(
            rows, labels, weight, ignore_index=ignore_index, reduction="none", **smoothing
        )
        return found

    if size_average is not None or reduce is not None:
        return NotImplemented
    return _loss(logits, target, weight, ignore_index, reduction, rows_loss)


def _loss(
    logits: Logits,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    rows_loss: Callable[..., Tensor],
) -> Any:
    lead = logits.of.rows.shape[:-1]
    classes_last = logits.of.classes_at < 0
    if target.is_floating_point() or target.shape != lead or classes_last != (len(lead) == 1):
        return NotImplemented  # probabilities, or dimensions as only cross entropy itself knows
    losses = _reduced(logits, rows_loss, target)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counted = target != ignore_index
    if weight is None:
        return losses.sum() / counted.sum()
    return losses.sum() / weight[target[counted]].sum()


@_handles(torch.gather, Tensor.gather)
def _gather(_func: Any, logits: Logits, dim: int, index: Tensor, **kwargs: Any) -> Any:
    lead = logits.of.rows.shape[:-1]
    if kwargs or not _is_last(logits, dim) or index.shape[:-1] != lead:
        return NotImplemented
    return _reduced(logits, lambda rows, index: rows.gather(-1, index), index)


@_handles(torch.logsumexp, Tensor.logsumexp)
def _logsumexp(_func: Any, logits: Logits, dim: Any = None, keepdim: bool = False) -> Any:
    if not _is_last(logits, dim):
        return NotImplemented
    return _reduced(logits, lambda rows: rows.logsumexp(-1, keepdim))


@_handles(torch.argmax, Tensor.argmax)
def _argmax(_func: Any, logits: Logits, dim: Any = None, keepdim: bool = False) -> Any:
    if not _is_last(logits, dim):
        return NotImplemented
    with torch.no_grad():
        return _reduced(logits, lambda rows: rows.argmax(-1, keepdim))


def _reduced(logits: Logits, function: Callable[..., Tensor], *others: Tensor) -> Tensor:
    autocast = Autocast(logits.device)

    def reduction(*given: Tensor) -> Tensor:
        with autocast.again():
            return function(*given)

    return logits.of.reduced(reduction, *others)


def _is_last(logits: Logits, dim: Any) -> bool:
    return (
        logits.of.classes_at < 0 and isinstance(dim, int) and dim % logits.dim() == logits.dim() - 1
    )
