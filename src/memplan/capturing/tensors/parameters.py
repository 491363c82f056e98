"""Parameters are fake from birth, and stay the same objects when their module is moved.

`nn.Parameter(data)` keeps a fake tensor of the data's shape and lets the real data go (pages of a
`torch.empty` that nobody touched cost nothing; initialisers then run on fake tensors). Moving a
module replaces the contents of its parameters in place, as on a real device, so that an optimizer
made before the move, tied weights and weak references keep working.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.fake.plain_class import base_data, is_fake, set_data
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.state import CaptureState

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def install(patches: Patches, state: CaptureState) -> None:
    """Patch `nn.Parameter`, `Tensor.data`, `swap_tensors`, module moves until `patches.undo()`."""
    patches.set(torch.nn.Parameter, "__new__", staticmethod(_making(state)))
    _keep_parameters_in(patches, state)
    patches.set(torch.utils, "swap_tensors", _swapping(state))

    def set_any_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            set_data(tensor, value if isinstance(value, FakeTensor) else _adopted(state, value))
        elif isinstance(value, FakeTensor):
            _become_fake(tensor, value)
        else:
            base_data.__set__(tensor, value)

    patches.set(torch.Tensor, "data", property(_get_data, set_any_data))


def _making(state: CaptureState) -> Callable[..., Any]:
    """Stand-in for `Parameter.__new__`."""
    real = torch.nn.Parameter.__new__

    @cache
    def of_fakes() -> frozenset[str]:
        # Accelerate hands on a parameter's `__dict__`, where a fake one keeps what makes it fake.
        return frozenset(vars(state.fakify(torch.empty(0))))

    def new(cls: Any, data: Any = None, requires_grad: bool = True, **more: Any) -> Any:
        if others := {name: more[name] for name in more.keys() - of_fakes()}:
            return real(cls, data, requires_grad, **others)
        plain = type(data) in _PLAIN
        if plain and not is_fake(data) and _is_plain_cpu(data):
            data = _adopted(state, data)
        if not is_fake(data):
            return real(cls, data, requires_grad)
        if isinstance(data, torch.nn.Parameter) and not plain:  # of a package, being moved
            return data.requires_grad_(requires_grad)
        made = data.detach().requires_grad_(requires_grad)
        made.__class__ = cls
        state.belongs_to_module(made)
        return made

    return new


def _keep_parameters_in(patches: Patches, state: CaptureState) -> None:
    """Modules: moved, copied, given a buffer."""
    real_apply: Any = torch.nn.Module._apply
    real_set_state: Any = torch.nn.Module.__setstate__
    real_register: Any = torch.nn.Module.register_buffer
    belongs_to_module = state.belongs_to_module

    def apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> Any:
        _make_parameters_fake(module, state)
        moved = real_apply(module, fn, recurse)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            belongs_to_module(tensor)
        return moved

    def set_state(module: torch.nn.Module, state: dict[str, Any]) -> None:
        real_set_state(module, state)
        for tensor in module._buffers.values():  # of a copy; its parameters were made anew
            belongs_to_module(tensor)

    def register_buffer(
        module: torch.nn.Module, name: str, tensor: Any, persistent: bool = True
    ) -> None:
        real_register(module, name, tensor, persistent)
        belongs_to_module(tensor)

    patches.set(torch.nn.Module, "_apply", apply)
    patches.set(torch.nn.Module, "__setstate__", set_state)
    patches.set(torch.nn.Module, "register_buffer", register_buffer)


def _swapping(state: CaptureState) -> Callable[..., None]:
    """Stand-in for `torch.utils.swap_tensors`."""
    real = torch.utils.swap_tensors

    def swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
        left, right = t1, t2
        fake = isinstance(left, FakeTensor) and isinstance(right, FakeTensor)
        if fake and left.is_meta == right.is_meta:  # `.data` keeps to one kind
            set_data(cast("FakeTensor", left), cast("FakeTensor", right))
        else:
            _forget_conversions(state, left, right)
            real(left, right)  # type: ignore[no-untyped-call]

    return swap


def _become_fake(tensor: torch.Tensor, value: FakeTensor) -> None:
    """`tensor.data = value` for a real tensor, such as a buffer that moves to the device: the same
    object is a fake tensor from now on."""
    fake = value.detach().requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, fake)
    tensor.__dict__.update(fake.__dict__)


def _get_data(tensor: torch.Tensor) -> Any:
    return base_data.__get__(tensor)


def _forget_conversions(state: CaptureState, *tensors: torch.Tensor) -> None:
    """The fake mode remembers by weak reference what it made, and a tensor that has such references
    cannot change places with another."""
    memo = state.fake_mode.fake_tensor_converter.tensor_memo
    for key in [key for key, made in memo.items() if any(made is tensor for tensor in tensors)]:
        del memo[key]


def _adopted(state: CaptureState, data: torch.Tensor) -> FakeTensor:
    """A fake tensor that takes the place of real data."""
    fake = state.fakify(data)
    state.host.adopt(fake, data)
    return fake


def _is_plain_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _make_parameters_fake(module: torch.nn.Module, state: CaptureState) -> None:
    """Parameters that got past `nn.Parameter` (unpickled ones, materialised lazy ones)."""
    for name, parameter in module._parameters.items():
        if parameter is None or isinstance(parameter, FakeTensor) or not _is_plain_cpu(parameter):
            continue
        if type(parameter) is torch.nn.Parameter:
            fake = torch.nn.Parameter(_adopted(state, parameter), parameter.requires_grad)
            module._parameters[name] = fake
