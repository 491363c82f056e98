"""The job's tensors have PyTorch's own classes: `type(t) is torch.Tensor`, `nn.Parameter` or a
subclass that the job made of it, as on a real device.

Packages ask for exact types (`type(parameter)(value, requires_grad=…)`, `type(t) is torch.Tensor`)
and take another way, or none, for a `FakeTensor`. What makes a fake tensor is not its class but its
dispatch keys and what stands in its `__dict__`; so it is made as PyTorch makes it, and its class
is then assigned. Three things that PyTorch finds by the class are put where the object is asked:

- `isinstance(t, FakeTensor)`, by a metaclass of `FakeTensor`;
- `t.__torch_dispatch__`, which C++ calls where no mode is in force: `torch.Tensor`'s is a
  descriptor, and says as ever that there is none to a class and to a real tensor;
- the properties of `FakeTensor` that `torch.Tensor` lacks.

They stay as long as a fake mode of ours lives, which each of its tensors keeps alive: the tensors
of a capture may outlive it. Then PyTorch is as it was.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from memplan.capturing.patches.attributes import Patches

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_OWN_CLASSES = (_Tensor, _Parameter, FakeTensor)
_no_dispatch = torch.Tensor.__torch_dispatch__
_fake_dispatch = FakeTensor.__torch_dispatch__
_new_fake = FakeTensor.__new__
_OF_FAKE_TENSORS = (
    "fake_device",
    "_normalize_fake_device",
    "nonzero_memo",
    "item_memo",
    "unique_memo",
    "unique_consecutive_memo",
    "nested_int_memo",
    "get_nested_int",
)
_metaclass: Any = type(FakeTensor)
_storage: Any = torch.Tensor.untyped_storage
_STATE = "_memplan_fake_state"
_TYPE_OF_OBJECT = ctypes.sizeof(ctypes.c_void_p)
"""The offset at which CPython stores an object's type: behind the reference count."""


class _FakeTensorType(type(FakeTensor)):  # type: ignore[misc]
    """`FakeTensor`'s class: fake tensors are those that have a fake device."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return is_fake(instance)


class _OfFakes:
    """An attribute that only fake tensors have, as `FakeTensor` defines it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: Any = vars(FakeTensor)[name]

    def __get__(self, tensor: Any, cls: type) -> Any:
        if tensor is None:
            return self
        if tensor._fake_device is None:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {self._name!r}")
        return self._known.__get__(tensor, cls)

    def __set__(self, tensor: Any, value: Any) -> None:
        self._known.__set__(tensor, value)


def _get_device(tensor: Any) -> Any:
    return tensor._fake_device


def _set_device(tensor: Any, device: torch.device) -> None:
    tensor._fake_device = device


class _FakeDevice:
    """`torch.Tensor._fake_device`, for tensors whose `__dict__` has none.

    A subclass may put another `__dict__` in the place of its own (MONAI's MetaTensor does so, with
    another tensor's metadata). What made it fake was noted with its storage.
    """

    def __get__(self, tensor: Any, cls: Any) -> Any:
        if tensor is None or cls in _OWN_CLASSES or cls.__torch_dispatch__ is not _no_dispatch:
            return None
        if not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
            return None
        state = getattr(_storage(tensor), _STATE, None)
        if state is None:
            return None
        vars(tensor).update(state)
        return state["_fake_device"]


def dress(fake: Any, cls: type) -> None:
    """Make a new fake tensor one of a subclass of the job's."""
    setattr(_storage(fake), _STATE, dict(vars(fake)))
    fake.__class__ = cls


class _Dispatch:
    """`torch.Tensor.__torch_dispatch__`."""

    def __get__(self, tensor: Any, _cls: type) -> Any:
        if tensor is None or tensor._fake_device is None:
            return _no_dispatch
        return _dispatch


def _dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    wrappers = [
        kind
        for kind in types
        if kind.__torch_dispatch__ is not _no_dispatch and kind is not FakeTensor
    ]
    # A wrapper (DTensor) asks again for what it holds. Where it passes its own types on with that,
    # none of them is among the arguments.
    if wrappers and any(type(leaf) in wrappers for leaf in pytree.tree_leaves((args, kwargs))):
        return NotImplemented
    return _fake_dispatch(func, (), args, kwargs)


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    made: Any = _new_fake(cls, *args, **kwargs)
    wanted = getattr(made.fake_mode, "tensor_class", cls)
    if wanted is not cls:
        made.__class__ = wanted
    return made


_modes = 0
_patches = Patches()


def install(mode: FakeTensorMode) -> None:
    """Teach PyTorch that a tensor of any class may be a fake one, as long as `mode` lives.

    Raises RuntimeError where CPython or PyTorch are not as expected.
    """
    global _modes
    if not _modes:
        _change_classes()
    _modes += 1
    weakref.finalize(mode, _uninstall).atexit = False


def _uninstall() -> None:
    global _modes
    _modes -= 1
    if not _modes:
        _set_metaclass(_FakeTensorType, _metaclass)
        _patches.undo()


def _change_classes() -> None:
    put = _patches.set
    _set_metaclass(_metaclass, _FakeTensorType)
    if "fake_device" not in vars(FakeTensor):  # a plain attribute in PyTorch 2.11, a property since
        put(FakeTensor, "fake_device", property(_get_device, _set_device), new=True)
    for name in _OF_FAKE_TENSORS:
        if name in vars(FakeTensor):
            put(_Tensor, name, _OfFakes(name), new=True)
    put(FakeTensor, "__new__", staticmethod(_new))
    put(_Tensor, "_fake_device", _FakeDevice(), new=True)
    put(_Tensor, "__torch_dispatch__", _Dispatch())


def _set_metaclass(before: type, after: type) -> None:
    """Replace a metaclass of `FakeTensor`. `FakeTensor.__class__ = …` is refused, because one of
    the two classes is implemented in C."""
    cell = ctypes.c_void_p.from_address(id(FakeTensor) + _TYPE_OF_OBJECT)
    if cell.value != id(before):
        raise RuntimeError("this Python keeps an object's type elsewhere")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(after))
    cell.value = id(after)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(before))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(FakeTensor))


base_data: Any = torch.Tensor.data


def set_data(tensor: FakeTensor, value: FakeTensor) -> None:
    """`tensor.data = value`, with the Python side of the fake device moved along."""
    base_data.__set__(tensor, value)
    tensor.fake_device = value.fake_device


def is_fake(item: Any) -> bool:
    """`isinstance(item, FakeTensor)`."""
    if not isinstance(item, _Tensor) or item._fake_device is None:  # type: ignore[attr-defined]
        return False
    return type(item) in _OWN_CLASSES or _is_still_fake(item)


def _is_still_fake(tensor: Any) -> bool:
    """Whether a tensor of a class of the job's is fake, as its `__dict__` says. A real one may have
    a copy of a fake one's (fastai hands metadata on so); then what makes it fake is removed."""
    if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
        return True
    del vars(tensor)["_fake_device"]
    return False


@contextmanager
def undressed(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context manager in which instances of the job's tensor subclasses have PyTorch's own class.
    A device's kernels only see memory. But a shape rule is Python code that calls the tensor's
    methods, and would find those of the subclass (MONAI's MetaTensor has its own `new_empty`)."""
    dressed = [(tensor, type(tensor)) for tensor in tensors if type(tensor) not in _OWN_CLASSES]
    for tensor, kind in dressed:
        with suppress(TypeError):  # one with slots stays as it is
            tensor.__class__ = _Parameter if issubclass(kind, _Parameter) else _Tensor
    try:
        yield
    finally:
        for tensor, kind in dressed:
            tensor.__class__ = kind
