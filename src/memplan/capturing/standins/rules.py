"""Rules for what cannot be seen: the memory of operators and functions that only a GPU runs.

A rule is a Python function that takes what the real one takes, after a `Call`, and makes the
memory that the real one makes: outputs with `torch.empty` and its kin, what is kept for the
backward pass with `call.save`, temporaries and workspaces with `call.workspace`. Everything that it
allocates is recorded under the rule's name with provenance RULE.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from memplan.capturing.standins import rule_errors
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError, MemplanError, UsageError
from memplan.types.trace import Provenance

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OURS = (str(Path(__file__).parents[2]), contextlib.__file__)

_captures: list[CaptureState] = []
"""The capture that is running, if one is."""


@dataclass
class Call:
    """One call of a rule: what it keeps, and the memory it holds only while it runs."""

    needs_grad: tuple[bool, ...] = ()
    """For each tensor among the arguments, in order: whether its gradient is needed."""
    saved: tuple[Any, ...] = ()
    """In the backward pass: what the forward rule saved."""
    _kept: list[Any] = field(default_factory=list)
    _held: list[torch.Tensor] = field(default_factory=list)

    def save(self, *items: Any) -> None:
        """Keep tensors (inputs, outputs or others) and plain values for the backward pass."""
        self._kept.extend(items)

    def workspace(
        self, nbytes: int, low: int | None = None, high: int | None = None
    ) -> torch.Tensor:
        """Device memory of `nbytes` bytes, between `low` and `high` where that is not exact.

        It is held until the rule returns, or as long as it is saved. A flat uint8 tensor.
        Raises ValueError for bounds that do not hold `nbytes`, TypeError for parts of a byte.
        """
        nbytes = operator.index(nbytes)
        low = nbytes if low is None else operator.index(low)
        high = nbytes if high is None else operator.index(high)
        if not 0 <= low <= nbytes <= high:
            raise ValueError(f"a workspace of {nbytes} bytes between {low} and {high}")
        tensor = _bounded(nbytes, low, high)
        self._held.append(tensor)
        return tensor


def _bounded(nbytes: int, low: int, high: int) -> torch.Tensor:
    state = running()
    if state is None:
        return torch.empty(nbytes, dtype=torch.uint8)
    device = torch.device(state.device_type, 0) if state.device_type != "cpu" else "cpu"
    made = state.blank([nbytes], torch.uint8, device)
    builder, recorder = state.recorder.builder, state.recorder
    recorder.flush()
    state.context.locate(state.acting_for, recorder.stream)
    builder.begin_op(state.acting or "rule", stream=recorder.stream)
    number = recorder.track(made, 0, provenance=Provenance.RULE, low=low, high=high)
    builder.op_writes([number])
    return made


class Rule:
    """A function that says what another one takes; called in its place.

    `name` is `namespace::operator`, or the dotted name of a Python function or Triton kernel.
    """

    def __init__(self, name: str, function: Callable[..., Any], source: str = "") -> None:
        self.name = name
        self.source = source
        self.function = function
        self.of_backward: Callable[..., Any] | None = None
        self.built_in = rule_errors.is_ours(function)
        self.__name__ = name.replace("::", ".").rpartition(".")[2]
        self.__doc__ = function.__doc__
        try:
            call, *parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise _takes_no_call(name, function) from error
        if call.kind in (call.KEYWORD_ONLY, call.VAR_KEYWORD):
            raise _takes_no_call(name, function)
        if call.kind is call.VAR_POSITIONAL:
            parameters.insert(0, call)
        self.__signature__ = inspect.Signature(parameters)

    def backward(self, function: _Function) -> _Function:
        """Say what the backward pass makes: `function(call, *gradients of the outputs)` returns a
        gradient (or None) for each tensor among the arguments, in order. A decorator."""
        self.of_backward = function
        return function

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """In a class a rule is a method: the instance is the first argument."""
        if instance is None:
            return self
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __getitem__(self, _grid: Any) -> Rule:
        """Makes a Triton kernel callable as `kernel[grid](...)`."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        wants = torch.is_grad_enabled() and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        )
        if wants:
            return _Differentiable.apply(self, spec, *leaves)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return self.run(Call(), *args, **kwargs)

    def run(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """The rule itself, recorded under its name."""
        return self._run(self.function, call, args, kwargs)

    def run_backward(self, call: Call, *gradients: Any) -> tuple[Any, ...]:
        """What the backward rule makes. Raises CaptureError where there is none."""
        if self.of_backward is None:
            state = running()
            raise CaptureError(
                f"{(state.source() if state else '') or 'the script'}: the backward pass of "
                f"{self.name} cannot be captured: its rule says nothing of it",
                f"add one: @rule.backward beside memplan.register_rule({self.name!r})",
            )
        made = self._run(self.of_backward, call, gradients, {})
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    def check(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Raises CaptureError where a user's rule gives something else than its operator does."""
        state = running()
        if state is not None and not self.built_in:
            rule_errors.check_returns(state, self.name, self.function, func, (args, kwargs), made)

    def _run(self, function: Any, call: Call, args: Any, kwargs: Any) -> Any:
        state = running()
        if state is None:
            return function(call, *args, **kwargs)
        state.kernels[self.name, "rule", self.source or "memplan.register_rule"] += 1
        with acting(state, self.name):
            try:
                made = function(call, *args, **kwargs)
            except Exception as error:
                if self.built_in or isinstance(error, MemplanError):
                    raise
                given = (call, *args), kwargs
                raise rule_errors.failed(state, self.name, function, error, given) from error
            finally:
                call._held.clear()
        if not self.built_in:
            inputs = (args, kwargs, call.saved)
            rule_errors.check_devices(state, self.name, function, inputs, (made, call._kept))
        return made


def _takes_no_call(name: str, function: Any) -> UsageError:
    place = rule_errors.place_of(function)
    return UsageError(
        f"{place + ': ' if place else ''}the rule for {name} is not a function that takes a call",
        "def rule(call, x, ...): first a call, then what the real one takes (docs/packages.md)",
    )


@contextmanager
def acting(state: CaptureState, name: str) -> Iterator[None]:
    """A context manager in which allocations belong to `name` and are known by a rule."""
    before = state.acting, state.acting_for, state.recorder.provenance
    state.acting, state.recorder.provenance = name, Provenance.RULE
    state.acting_for = _calling_frame() if not before[0] else before[1]
    try:
        yield
    finally:
        state.acting, state.acting_for, state.recorder.provenance = before


def _calling_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def running() -> CaptureState | None:
    """The state of the capture that is running, if one is."""
    return _captures[-1] if _captures else None


class _Differentiable(torch.autograd.Function):
    """A rule as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, spec: Any, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        call = Call(needs_grad=tuple(tensor.requires_grad for tensor in tensors))
        result = rule.run(call, *args, **kwargs)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        written = [out for out in outputs if any(out is tensor for tensor in tensors)]
        if written:
            ctx.mark_dirty(*written)
        kept = call._kept
        ctx.save_for_backward(*[item for item in kept if isinstance(item, torch.Tensor)])
        ctx.plain = [None if isinstance(item, torch.Tensor) else (item,) for item in kept]
        ctx.rule, ctx.needs_grad = rule, call.needs_grad
        ctx.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.leaves = len(leaves)
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        saved = tuple(next(tensors) if item is None else item[0] for item in ctx.plain)
        call = Call(needs_grad=ctx.needs_grad, saved=saved)
        made = ctx.rule.run_backward(call, *gradients)
        rule_errors.check_gradients(ctx.rule.name, ctx.rule.of_backward, made, ctx.shapes)
        result: list[Any] = [None] * (2 + ctx.leaves)
        for position, gradient, wanted in zip(ctx.positions, made, ctx.needs_grad, strict=True):
            result[2 + position] = gradient if wanted else None
        return tuple(result)
