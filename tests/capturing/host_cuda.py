"""Tensors that say they are on CUDA and whose kernels run on the host, in place of a real card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from memplan.capturing import session
from memplan.capturing.cuda.device import fake_cuda_device


class HostCuda(torch.Tensor):
    """A real tensor `on_host` that reports the device `cuda:0`."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor) -> HostCuda:
        made: HostCuda = torch.Tensor._make_wrapper_subclass(
            cls,
            on_host.size(),
            on_host.stride(),
            dtype=on_host.dtype,
            device=torch.device("cuda", 0),
        )
        made.on_host = on_host
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        capture = session._active
        if capture is not None and capture.state.everything:
            # A capture leaves wrappers to themselves; a real tensor of a card it takes as it is.
            def fake(item: Any) -> Any:
                return capture.state.fakify(item) if isinstance(item, HostCuda) else item

            return func(*tree_map(fake, args), **tree_map(fake, kwargs))
        to_host = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
        if "device" in kwargs:
            kwargs["device"] = "cpu"

        def host(item: Any) -> Any:
            return item.on_host if isinstance(item, HostCuda) else item

        def device(item: Any) -> Any:
            plain = isinstance(item, torch.Tensor) and not to_host
            return HostCuda(item) if plain else item

        return tree_map(device, func(*tree_map(host, args), **tree_map(host, kwargs)))


@contextmanager
def a_card() -> Iterator[None]:
    """While entered, PyTorch finds a CUDA device, as in a process with a real one."""
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        "is_bf16_supported": lambda *_: True,
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
    }
    with fake_cuda_device(), mock.patch.multiple(torch.cuda, **answers):
        yield


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """`module.cuda()`, in place."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            child._parameters[name] = torch.nn.Parameter(
                HostCuda(parameter.detach()), parameter.requires_grad
            )
        for name, buffer in child.named_buffers(recurse=False):
            child._buffers[name] = HostCuda(buffer)
    return module
