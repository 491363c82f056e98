"""Recognises repeated forwards without gradients: an evaluation's batches, the steps of a sampler.

The loop around them is the script's, and it runs. But once a module's calls in a row asked for the
same memory, from the same number of bytes in use on, the next ones are answered with results like
the last one's, and only these are recorded. After distances that double a call is run all the same,
and must be like the others; otherwise all are run again.

This is sound as long as a call only computes its results, and that is checked: no attribute of the
module or its submodules has changed, and there are no hooks; no tensor from before was written; no
value was read, so that no shape and no branch depends on one; memory that the call asked for and
did not return was freed before the next; no other process, stream or real tensor took part. Any
other call is run.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.capturing.fake.plain_class import is_fake

if TYPE_CHECKING:
    from memplan.capturing.state import CaptureState

aten = torch.ops.aten

_ALIKE = 4
"""After so many equal calls in a row, a call is not run."""
_ALIKE_IN_STEPS = 32
"""The same between training steps. Neither a teacher nor a step's own sampling is called so often
in a row; a step is compared, planned and timed by what it runs."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, deque)
_OP = "memplan.repeated_forward"


class _Plain(NamedTuple):
    """A result of a call that is no tensor."""

    value: object


class _Output(NamedTuple):
    """A tensor among the results of a call."""

    storage: int
    """Number of its storage among those made for the outputs."""
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    origin: str


class _Before(NamedTuple):
    """What a call finds."""

    state: object
    """The state of the module."""
    preconditions: object
    stream: int


class _Seen(NamedTuple):
    """Everything that is compared between calls."""

    before: _Before
    live_bytes: int
    """Bytes in use when it began."""
    requests: bytes
    outputs: tuple[_Output | _Plain, ...]
    spec: pytree.TreeSpec
    work: tuple[int, int]
    """FLOPs, and bytes moved."""


@dataclass
class _Row:
    """Equal calls in a row."""

    seen: _Seen
    alike: int = 1
    distance: int = 1
    """How many calls are answered before the next one is run."""
    answered: int = 0

    def foresees(self, before: _Before, live_bytes: int, enough: int) -> bool:
        """Whether a call that finds this need not be run. With fewer bytes in use at its beginning,
        its peak is not higher."""
        known = self.alike >= enough and self.answered < self.distance
        return known and before == self.seen.before and live_bytes <= self.seen.live_bytes


class Repeats:
    """Runs a job's forwards without gradients, or answers them."""

    def __init__(self, state: CaptureState) -> None:
        self.state = state
        self._rows: dict[object, _Row] = {}
        self._disturbed = False
        self._thread = 0
        self._answered: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def over(self) -> None:
        """Count anew: something else ran, a forward with gradients or an optimizer."""
        self._rows.clear()

    def call(
        self,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        run: Callable[[], Any],
        *,
        in_steps: bool,
    ) -> Any:
        """The result of `run()`, which calls `module` with these arguments, or a similar one.
        `in_steps`: whether the call is between training steps."""
        recorder = self.state.recorder
        state, key = _state_of(module), _key_of(module, args, kwargs)
        if state is None or key is None or recorder.finished:
            return run()
        name = type(module).__name__
        self._calls[name] += 1
        before = _Before(state, self._preconditions(), recorder.stream)
        recorder.flush()
        row = self._rows.get(key)
        if row is not None and row.foresees(
            before, recorder.live_bytes, _ALIKE_IN_STEPS if in_steps else _ALIKE
        ):
            row.answered += 1
            self._answered[name] += 1
            return self._answer(row.seen)
        result, found = self._observe(module, before, run)
        if found is None:
            self._rows.pop(key, None)
        elif row is None or row.seen != found:
            self._rows[key] = _Row(found)
        else:
            row.alike += 1
            if row.answered:
                row.distance, row.answered = 2 * row.distance, 0
        return result

    def notes(self) -> list[str]:
        """Notes for the answer."""
        return [
            f"{count} of {self._calls[name]} forwards of {name} without gradients were not run: "
            "they would have repeated the one before"
            for name, count in self._answered.items()
        ]

    def _preconditions(self) -> object:
        device = self.state.device_type
        return (
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            torch._C._len_torch_function_stack(),
            len(_get_current_dispatch_mode_stack()),
        )

    def _observe(
        self, module: torch.nn.Module, before: _Before, run: Callable[[], Any]
    ) -> tuple[Any, _Seen | None]:
        """The result of a call that is run; and what it did, if it only computed that result."""
        state = self.state
        recorder, builder = state.recorder, state.recorder.builder
        start, newest, live = len(builder), builder.newest_storage, recorder.live_bytes
        op, looked = builder.ops, state.values.looked_at
        self._disturbed, self._thread = False, threading.get_ident()
        state.on_foreign_op = self._disturb
        try:
            result = run()
        finally:
            state.on_foreign_op = None
        recorder.flush()
        quiet = not self._disturbed and state.values.looked_at == looked
        if not quiet or recorder.stream != before.stream or _state_of(module) != before.state:
            return result, None
        if not builder.only_made_new(start, op, newest):
            return result, None
        leaves, spec = pytree.tree_flatten(result)
        outputs = self._outputs(leaves, newest)
        if outputs is None:
            return result, None
        requests = builder.requests(start, len(builder))
        return result, _Seen(before, live, requests, outputs, spec, builder.work_since(op))

    def _disturb(self) -> None:
        if threading.get_ident() == self._thread:  # and not one that pins batches
            self._disturbed = True

    def _outputs(self, leaves: list[Any], newest: int) -> tuple[_Output | _Plain, ...] | None:
        """What is needed to make similar results; None if that is not known."""
        made: dict[int, torch.dtype] = {}
        outputs: list[_Output | _Plain] = []
        for leaf in leaves:
            if isinstance(leaf, _PLAIN):
                outputs.append(_Plain(leaf))
                continue
            if not is_fake(leaf) or type(leaf) is not torch.Tensor or leaf.requires_grad:
                return None
            number = self.state.number_of(leaf)
            if number <= newest or self.state.values.of(leaf) is not None:
                return None
            nbytes = leaf.untyped_storage().nbytes()
            if made.setdefault(number, leaf.dtype) != leaf.dtype or nbytes % leaf.itemsize:
                return None
            outputs.append(
                _Output(
                    list(made).index(number),
                    nbytes,
                    leaf.dtype,
                    leaf.fake_device,  # type: ignore[attr-defined]
                    tuple(leaf.size()),
                    tuple(leaf.stride()),
                    int(leaf.storage_offset()),
                    self.state.values.origin(leaf),
                )
            )
        return tuple(outputs)

    def _answer(self, seen: _Seen) -> Any:
        state = self.state
        state.begin_host_op(_OP, sys._getframe(2))
        flops, moved_bytes = seen.work
        state.recorder.builder.op_work(flops=flops, moved_bytes=moved_bytes)
        made: dict[int, FakeTensor] = {}
        leaves = [
            self._like(output, made) if isinstance(output, _Output) else output.value
            for output in seen.outputs
        ]
        return pytree.tree_unflatten(leaves, seen.spec)

    def _like(self, output: _Output, made: dict[int, FakeTensor]) -> FakeTensor:
        shape = output.size, output.stride
        whole = made.get(output.storage)
        if whole is None:
            blank = partial(self.state.blank, dtype=output.dtype, device=output.device)
            whole = blank(output.size, stride=output.stride)
            if output.offset or whole.untyped_storage().nbytes() != output.nbytes:
                whole = blank((output.nbytes // output.dtype.itemsize,), stride=(1,))
            made[output.storage] = whole
            self.state.recorder.builder.op_writes([self.state.record(whole)])
            self.state.values.note_origin(whole, output.origin)
            if (tuple(whole.size()), tuple(whole.stride())) == shape:
                return whole
        part: FakeTensor = self.state.fake_mode.dispatch(
            aten.as_strided.default, (), (whole, *shape, output.offset), {}
        )
        return part


def _key_of(module: torch.nn.Module, args: Any, kwargs: Any) -> object:
    """A key, equal for calls with arguments of the same kind; None if they cannot be compared."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kinds: list[object] = [id(module), repr(spec)]
    for leaf in leaves:
        if isinstance(leaf, _PLAIN):
            kinds.append((type(leaf), leaf))
        elif type(leaf) is torch.Tensor:
            shape = tuple(leaf.size()), tuple(leaf.stride())
            # Kernels look at how an operand is aligned, not at where a number is read from.
            offset = leaf.storage_offset() if leaf.numel() > 1 else 0
            kinds.append(
                (is_fake(leaf), leaf.dtype, leaf.device, leaf.requires_grad, *shape, offset)
            )
        else:
            return None
    return tuple(kinds)


def _state_of(root: torch.nn.Module) -> object:
    """The state of a module and its submodules, as far as Python shows it. None for a module with
    hooks or a compiled one, which may do anything."""
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return None
    state: list[object] = []
    for module in root.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            return None
        state.append(id(module))
        state += [(name, _token(value)) for name, value in vars(module).items()]
        for tensors in (module._parameters, module._buffers):
            state += [(id(tensor), *_geometry(tensor)) for tensor in tensors.values()]
    return state


def _token(value: object) -> object:
    """A token that changes where an attribute is replaced, counted up or appended to."""
    if isinstance(value, _PLAIN):
        return type(value), value
    return id(value), len(value) if isinstance(value, _CONTAINERS) else 0


def _geometry(tensor: torch.Tensor | None) -> tuple[object, ...]:
    return () if tensor is None else (tensor.dtype, tensor.device, tensor.size())
