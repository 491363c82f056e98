"""Errors in users' rules: they name the rule's file and line, not those of the script's call."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from memplan.capturing.recording.context import shown_path
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError, first_line

_MEMPLAN = str(Path(__file__).parents[2])
_DEBUG = "correct the rule (docs/packages.md); MEMPLAN_DEBUG=1 shows the whole traceback"


def place_of(function: Callable[..., Any]) -> str:
    """`file:line` where a function is defined; empty where it has no code of its own."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{_shown(code.co_filename)}:{code.co_firstlineno}"


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether a rule came with memplan: what it raises is the script's own fault, or ours."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_MEMPLAN)


def failed(
    state: CaptureState, name: str, function: Callable[..., Any], error: Exception, call: Any
) -> CaptureError:
    """The error for a rule that raised one. `call`: what it was called with, `(args, kwargs)`."""
    if not _takes(function, *call):
        return CaptureError(
            f"{_where(state)}: {_named(name, function)} does not take what the script passes: "
            f"{error}",
            f"it takes {_signature(function)}; after the call, a rule takes what the real one does",
        )
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    place = f"{_shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else place_of(function)
    return CaptureError(
        f"{place}: the rule for {name} raised {type(error).__name__}: {first_line(error)} "
        f"(called at {_where(state)})",
        _DEBUG,
    )


def check_devices(
    state: CaptureState, name: str, function: Callable[..., Any], inputs: Any, made: Any
) -> None:
    """Raises CaptureError where a rule made its memory on the host, though the real one's tensors
    are on the device: it would be counted nowhere."""
    given = list(_tensors(inputs))
    if not any(isinstance(tensor, FakeTensor) for tensor in given):
        return
    known = {id(tensor) for tensor in given}
    for tensor in _tensors(made):
        if not isinstance(tensor, FakeTensor) and id(tensor) not in known:
            raise CaptureError(
                f"{_named(name, function)} made a tensor of shape {tuple(tensor.shape)} on the "
                f"{tensor.device} and its arguments are on the device (called at {_where(state)})",
                "make it with torch.empty(..., device=x.device), x.new_empty or torch.empty_like",
            )


def check_gradients(
    name: str,
    function: Callable[..., Any],
    made: Sequence[Any],
    shapes: Sequence[torch.Size],
) -> None:
    """Raises CaptureError where a backward rule gives too few gradients, or wrong ones."""
    who = f"the backward rule of {name}{_in_brackets(function)}"
    if len(made) != len(shapes):
        raise CaptureError(
            f"{who} made {len(made)} gradients for {len(shapes)} tensors among the arguments",
            "return one for each, in order; None where there is none",
        )
    for i, (gradient, shape) in enumerate(zip(made, shapes, strict=True)):
        if gradient is None:
            continue
        got = tuple(gradient.shape) if isinstance(gradient, torch.Tensor) else type(gradient)
        if got != tuple(shape):
            raise CaptureError(
                f"{who} made {_said(got)} for the gradient of tensor {i} among the arguments, "
                f"which has shape {tuple(shape)}",
                "a gradient has the shape of its tensor",
            )


def check_returns(
    state: CaptureState, name: str, function: Callable[..., Any], func: Any, call: Any, made: Any
) -> None:
    """Raises CaptureError where a rule gives something else than its operator does, by the
    operator's schema and, where PyTorch has one, its shape rule."""
    returns = func._schema.returns
    results = made if len(returns) != 1 and isinstance(made, (tuple, list)) else (made,)
    if not returns and made is None:
        return
    wanted = [str(item.type) for item in returns]
    fits = len(results) == len(wanted) and all(map(_is_a, results, wanted))
    if not fits:
        raise CaptureError(
            f"{_named(name, function)} returned {', '.join(map(_kind, results))}, and the operator "
            f"returns {', '.join(wanted) or 'nothing'} (called at {_where(state)})",
            f"its schema is {func._schema}",
        )
    if func._schema.is_mutable:
        return
    try:
        args, kwargs = call
        expected = state.fake_mode.dispatch(func, (), args, kwargs)
    except Exception:  # no shape rule, or one that asks for values: the user's is the only one
        return
    for mine, theirs in zip(_tensors(made), _tensors(expected), strict=False):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise CaptureError(
                f"{_named(name, function)} returned {_geometry(mine)}, and the operator's shape "
                f"rule says {_geometry(theirs)} (called at {_where(state)})",
                "return what the operator returns; memory that is only used is call.workspace",
            )


def _takes(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_a(item: Any, wanted: str) -> bool:
    if wanted == "Tensor":
        return isinstance(item, torch.Tensor)
    if wanted == "Optional[Tensor]":
        return item is None or isinstance(item, torch.Tensor)
    if wanted == "List[Tensor]":
        return isinstance(item, (list, tuple)) and all(
            isinstance(inner, torch.Tensor) for inner in item
        )
    return not isinstance(item, torch.Tensor)


def _kind(item: Any) -> str:
    return "nothing" if item is None else type(item).__name__


def _geometry(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _said(got: Any) -> str:
    return f"shape {got}" if isinstance(got, tuple) else f"a {got.__name__}"


def _tensors(items: Any) -> Iterator[torch.Tensor]:
    return (item for item in pytree.tree_leaves(items) if isinstance(item, torch.Tensor))


def _named(name: str, function: Callable[..., Any]) -> str:
    return f"the rule for {name}{_in_brackets(function)}"


def _in_brackets(function: Callable[..., Any]) -> str:
    place = place_of(function)
    return f" ({place})" if place else ""


def _signature(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function)).partition(" -> ")[0]


def _where(state: CaptureState) -> str:
    return state.source() or "the script"


def _shown(filename: str) -> str:
    return shown_path(filename) or filename
