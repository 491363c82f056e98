"""Settings of PyTorch by which an op chooses what it computes, with which kernel, and on which
stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

Settings = tuple[Any, ...]

_settings: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
]
if torch.backends.cuda.is_built():
    _settings.append((torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled))
    for kind in ("matmul", "conv"):  # whether TF32 will do
        _settings.append(
            (
                partial(torch._C._get_fp32_precision_getter, "cuda", kind),
                partial(torch._C._set_fp32_precision_setter, "cuda", kind),
            )
        )
_getters = [get for get, _ in _settings]
_setters = [set_ for _, set_ in _settings]


def current_settings() -> Settings:
    return tuple([get() for get in _getters])


@contextmanager
def changing_settings() -> Iterator[Callable[[Settings], None]]:
    """Gives a function that puts settings in force; afterwards they are as before."""
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


def current_stream() -> int:
    """The current device's current stream, as the driver knows it."""
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))


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
