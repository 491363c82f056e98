"""Settings of PyTorch by which an op chooses what it computes, with which kernel, and on which
stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Settings = tuple[Any, ...]

_settings: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
]
_owners: list[tuple[Any, str]] = [(torch.backends.mkldnn, "enabled")]
if torch.backends.cuda.is_built():
    _owners += [
        (torch.backends.cudnn, "enabled"),
        (torch.backends.cuda.matmul, "fp32_precision"),  # whether TF32 will do
        (torch.backends.cudnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    ]
_settings += [(partial(getattr, *owner), partial(setattr, *owner)) for owner in _owners]
_getters = [get for get, _ in _settings]
_setters = [set_ for _, set_ in _settings]


def current_settings() -> Settings:
    return tuple([get() for get in _getters])


@contextmanager
def changing_settings() -> Iterator[Callable[[Settings], None]]:
    """Provide a function that applies settings; afterwards the previous ones are restored."""
    before = now = current_settings()

    def use(wanted: Settings) -> None:
        nonlocal now
        if wanted == now:
            return
        for set_, is_set, value in zip(_setters, now, wanted, strict=True):
            if value != is_set:
                set_(value)
        now = wanted

    try:
        yield use
    finally:
        use(before)


@contextmanager
def tensors_made_as_in_captures() -> Iterator[None]:
    """`torch.tensor(data, device="cuda")` shows its copy to the device as an op, as it does where
    the device is a fake one: a plan counts the ops there."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def tensors_are_fake() -> bool:
    """Whether the job is captured, or its shapes are worked out in advance."""
    return any(
        isinstance(mode, FakeTensorMode) or hasattr(mode, "fake_mode")
        for mode in _get_current_dispatch_mode_stack()
    )
