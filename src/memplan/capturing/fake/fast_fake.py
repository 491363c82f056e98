"""A fake mode that remembers what an operator's shape rule said.

A training job repeats the same operators on the same shapes in every layer and step, and what a
fake operator gives depends only on the operator, on the geometry of its tensors and on its other
arguments. Every rule is therefore run once for each such *signature*, and its result is taken
apart into a `_Plan`: which outputs are new storages, which are views of which input, and which are
an input itself. A plan is trusted only after it has been carried out once beside the rule's own
result and gave the same tensors, down to dispatch keys and storage bytes; whatever does not fit
(constants, sparse or quantised tensors, changed inputs, unknown arguments) is run in full each
time. A view that differs from an earlier one in its numbers alone (`buffer[i] = …`, step by step)
is the earlier one, lying where the operator's own kernel on `meta` says. PyTorch's own cache of
this kind costs several times more for each operator, because it also has to serve symbolic shapes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nested._internal.nested_int import NestedIntNode

from memplan.capturing.fake import plain_class

_MAX_PLANS = 200_000
_META = torch.device("meta")
_PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
_PLAIN_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_BUILT_IN = ("aten", "prims", "prim")
_NEVER = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set"})
"""Operators that look at, or change, what a signature does not hold: the size of a storage."""
_UNSAFE_TAGS = (
    torch.Tag.inplace_view,
    torch.Tag.data_dependent_output,
)
_OWN_STATE = ("_fake_device", "fake_mode")

_make_subclass = torch.Tensor._make_subclass
_CLASSES = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class _UnknownArgumentError(Exception):
    """An argument that a signature cannot stand for."""


@dataclass(frozen=True, slots=True)
class _Output:
    """How to make one output again."""

    source: int
    """Index of the input tensor that it is, or is a view of; -1 for a new storage."""
    same: bool
    """Whether it is that input itself."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int
    """Bytes that the storage has at least."""
    state: dict[str, Any]
    """The Python attributes of the fake tensor."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to make an operator's result again: outputs and constants, and what they come in."""

    outputs: tuple[Any, ...]
    container: type | None


class FastFakeMode(FakeTensorMode):
    """`FakeTensorMode` that runs every shape rule once for each signature."""

    tensor_class: type[torch.Tensor] = FakeTensor
    """The class of the tensors that it makes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        plain_class.install(self)
        self.cache_enabled = False  # PyTorch's own
        self.hits = 0
        """Operators that were answered from a plan."""
        self._plans: dict[tuple[Any, ...], _Plan | None] = {}
        self._views: dict[tuple[Any, ...], _Output] = {}
        """A view that was confirmed, for each signature without its integers."""
        self._eligible: dict[Any, bool] = {}
        self._aliasing: set[Any] = set()
        self._active = (
            self.shape_env is None
            and not self.propagate_real_tensors
            and not fake_tensor.FakeTensorConfig.debug
        )

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator's shape rule, or repeat what it said."""
        kwargs = kwargs or {}
        eligible = self._eligible.get(func)
        if eligible is None:
            eligible = self._eligible[func] = self._active and _is_eligible(func)
        if not eligible or self.in_kernel_invocation:
            return super().dispatch(func, types, args, kwargs)
        tensors: list[FakeTensor] = []
        try:
            key = self._signature(func, args, kwargs, tensors)
            plan = self._plans.get(key, _UNSEEN)
        except (_UnknownArgumentError, TypeError, RuntimeError):
            return super().dispatch(func, types, args, kwargs)
        if plan is _UNSEEN:
            return self._learn(key, func, types, args, kwargs, tensors)
        if plan is not None:
            result = _carry_out(plan, tensors)
            if result is not _UNSEEN:
                self.hits += 1
                return result
        return super().dispatch(func, types, args, kwargs)

    def _signature(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[FakeTensor]
    ) -> tuple[Any, ...]:
        """All that a shape rule can depend on; the tensors among the arguments are collected."""
        key: list[Any] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        any_number = func._schema.is_mutable or func._opname.startswith("_foreach_")
        self._describe(args, key, tensors, any_number)
        for name, value in kwargs.items():
            key.append(name)
            self._describe((value,), key, tensors, any_number)
        if func in self._aliasing:
            for tensor in tensors:
                key += (tensor.storage_offset(), (tensor.is_inference(), tensor.is_neg()))
        return tuple(key)

    def _describe(
        self, items: Any, key: list[Any], tensors: list[FakeTensor], any_number: bool
    ) -> None:
        for item in items:
            kind = type(item)
            if kind in _CLASSES and getattr(item, "fake_device", None) is not None:
                dense = item.layout is torch.strided
                if item.constant is not None or item.fake_mode is not self or not dense:
                    raise _UnknownArgumentError
                key += (item.shape, item.stride(), item.dtype, item.fake_device)
                tensors.append(item)
            elif kind is float and any_number:
                key.append(float)  # step sizes change with every step, shapes do not
            elif kind in _PLAIN:
                key += (kind, item)
            elif kind is list or kind is tuple or kind is torch.Size:
                key += (list, len(item))
                self._describe(item, key, tensors, any_number)
            else:
                raise _UnknownArgumentError

    def _learn(
        self,
        key: tuple[Any, ...],
        func: Any,
        types: Any,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[FakeTensor],
    ) -> Any:
        kind = tuple(part for part in key if type(part) is not int)
        if kind in self._views and (moved := _moved(self._views[kind], func, args, kwargs)):
            self._plans[key] = moved
            return _carry_out(moved, tensors)
        result = super().dispatch(func, types, args, kwargs)
        plan: _Plan | None = None
        unchanged = key == self._signature(func, args, kwargs, [])
        if unchanged and all(tensor.dtype in _PLAIN_DTYPES for tensor in tensors):
            plan = _plan(result, tensors)
        if plan is not None and func not in self._aliasing and _aliases(plan):
            self._aliasing.add(func)  # from now on its signatures say more
            return result
        if plan is not None and not _confirmed(plan, tensors, result):
            plan = None
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
            self._views.clear()
        self._plans[key] = plan
        of_first = func.is_view and len(tensors) == 1 and args[0] is tensors[0]
        if plan is not None and plan.container is None and of_first:
            self._views[kind] = plan.outputs[0]
        return result


_UNSEEN: Any = object()


class DeviceFakeMode(FastFakeMode):
    """The fake mode of a capture, for several threads: it never asks whether there is a device, and
    its tensors are of PyTorch's own classes (`capturing/fake/plain_class.py`)."""

    tensor_class = torch.Tensor

    def __init__(self) -> None:
        self._thread = threading.local()
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    @property
    def avoid_device_init(self) -> bool:
        return True

    @property
    def in_kernel_invocation(self) -> bool:
        """A fake tensor says that it is on `meta` in the thread whose kernel runs, only there."""
        return getattr(self._thread, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._thread.in_kernel = value

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        """The size of a jagged dimension: one of its own for each tensor of offsets, as outside of
        a fake mode."""
        self.nt_tensor_id_counter += 1
        return torch.SymInt(NestedIntNode(self.nt_tensor_id_counter, 1))

    def __deepcopy__(self, _memo: Any) -> DeviceFakeMode:
        return self  # every copy of a fake tensor carries its mode along


def _is_eligible(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in _BUILT_IN:
        return False
    if func in fake_tensor._DISPATCH_META_HANDLERS or func in fake_tensor._DISPATCH_HANDLE_DIRECTLY:
        return False
    if func.name().split(".")[0] in _NEVER or func in FakeTensorMode.lift_fns:
        return False
    if any(argument.is_out for argument in func._schema.arguments):
        return False
    return not any(tag in func.tags for tag in _UNSAFE_TAGS)


def _plan(result: Any, tensors: list[FakeTensor]) -> _Plan | None:
    """Take a result apart; None when there is something in it that cannot be made again."""
    container = type(result) if isinstance(result, (list, tuple)) else None
    if container not in (None, list, tuple):
        return None
    storages = {tensor.untyped_storage()._cdata: i for i, tensor in enumerate(tensors)}
    shared = len(storages) != len(tensors)
    fresh: set[int] = set()
    outputs: list[Any] = []
    for item in result if container is not None else (result,):
        if item is None or type(item) in (bool, int, float):
            outputs.append(item)
            continue
        same = [i for i, tensor in enumerate(tensors) if tensor is item]
        if not same and not (type(item) in _CLASSES and _is_plain(item)):
            return None
        address = item.untyped_storage()._cdata
        source = same[0] if same else storages.get(address, -1)
        if source < 0 and address in fresh:
            return None  # outputs that share a new storage
        if len(same) > 1 or (source >= 0 and not same and shared):
            return None  # which input it is depends on more than the signature
        fresh.add(address)
        outputs.append(_output(item, source, bool(same)))
    return _Plan(tuple(outputs), container)


def _is_plain(tensor: FakeTensor) -> bool:
    state = vars(tensor)
    return (
        plain_class.is_fake(tensor)
        and tensor.layout is torch.strided
        and tensor.dtype in _PLAIN_DTYPES
        and all(value is None for name, value in state.items() if name not in _OWN_STATE)
    )


def _output(tensor: FakeTensor, source: int, same: bool) -> _Output:
    return _Output(
        source=source,
        same=same,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
        device=tensor.fake_device,
        storage_bytes=_extent(tensor),
        state=dict(vars(tensor)),
    )


def _extent(tensor: FakeTensor) -> int:
    """Bytes from the start of the storage to the end of the tensor's last element."""
    last = int(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()


def _aliases(plan: _Plan) -> bool:
    return any(
        isinstance(item, _Output) and item.source >= 0 and not item.same for item in plan.outputs
    )


def _moved(view: _Output, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Plan | None:
    """The plan of a view like `view`, with other numbers."""
    base = args[0]
    if base.untyped_storage().nbytes() < _extent(base):
        return None  # `set_` would enlarge it
    with torch._C._DisableTorchDispatch():
        data = torch.empty(0, dtype=base.dtype, device=_META)
        data.set_(base.untyped_storage(), base.storage_offset(), base.shape, base.stride())
        made = func(data, *args[1:], **kwargs)
    moved = replace(
        view,
        shape=tuple(made.shape),
        stride=made.stride(),
        offset=int(made.storage_offset()),
        storage_bytes=_extent(made),
    )
    return _Plan((moved,), None)


def _carry_out(plan: _Plan, tensors: list[FakeTensor]) -> Any:
    with torch._C._DisableTorchDispatch():
        return _make_all(plan, tensors)


def _make_all(plan: _Plan, tensors: list[FakeTensor]) -> Any:
    """The result; the object `_UNSEEN` when a view would not fit its storage."""
    container = plan.container
    if container is None:
        item = plan.outputs[0]
        return _make(item, tensors) if type(item) is _Output else item
    made = [_make(item, tensors) if type(item) is _Output else item for item in plan.outputs]
    if any(item is _UNSEEN for item in made):
        return _UNSEEN
    return made if container is list else tuple(made)


def _make(output: _Output, tensors: list[FakeTensor]) -> Any:
    if output.same:
        return tensors[output.source]
    if output.source < 0:
        data = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=_META)
    else:
        storage = tensors[output.source].untyped_storage()
        if storage.nbytes() < output.storage_bytes:
            return _UNSEEN  # `set_` would enlarge it
        data = torch.empty(0, dtype=output.dtype, device=_META)
        data.set_(storage, output.offset, output.shape, output.stride)
    fake_mode = output.state["fake_mode"]
    fake: Any = _make_subclass(
        FakeTensor, data, False, dispatch_device=True, device_for_backend_keys=output.device
    )
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    fake.__dict__.update(output.state)
    fake.__class__ = fake_mode.tensor_class
    return fake


def _confirmed(plan: _Plan, tensors: list[FakeTensor], result: Any) -> bool:
    """Whether the plan makes just what the rule made."""
    made = _carry_out(plan, tensors)
    if made is _UNSEEN:
        return False
    ours, theirs = (made, result) if plan.container is not None else ((made,), (result,))
    return all(
        _same(one, other) if isinstance(one, FakeTensor) else one == other
        for one, other in zip(ours, theirs, strict=True)
    )


def _keys(tensor: FakeTensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _same(one: FakeTensor, other: FakeTensor) -> bool:
    if one is other:
        return True
    left, right = one.untyped_storage(), other.untyped_storage()
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and one.dtype == other.dtype
        and one.requires_grad == other.requires_grad
        and one.is_inference() == other.is_inference()
        and left.nbytes() == right.nbytes()
        and _keys(one) == _keys(other)
        and vars(one) == vars(other)
    )
