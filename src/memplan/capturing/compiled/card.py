"""The card as Dynamo and Inductor ask for it."""

from __future__ import annotations

import string
import sys
import types
from typing import Any

import torch
from torch._dynamo import device_interface
from torch._inductor import scheduler
from torch._inductor.codegen import triton_split_scan
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import hints
from torch.utils import _triton

from memplan.capturing.compiled.dynamo import OnHost
from memplan.capturing.patches.attributes import Patches

_ANSWERS = (
    "current_device",
    "set_device",
    "device_count",
    "stream",
    "current_stream",
    "set_stream",
    "synchronize",
    "get_device_properties",
    "memory_allocated",
    "is_bf16_supported",
)


def install(patches: Patches) -> None:
    """Answer as `torch.cuda` does in this capture, until `patches.undo()`."""
    cuda: Any = device_interface.CudaInterface  # it took hold of the functions when it was made
    for name in _ANSWERS:
        patches.set(cuda, name, staticmethod(getattr(torch.cuda, name)))
    for name in ("exchange_device", "maybe_exchange_device"):
        patches.set(cuda, name, staticmethod(_exchanged))
    patches.set(cuda, "get_raw_stream", staticmethod(lambda _index: 0))
    patches.set(cuda, "raise_if_triton_unavailable", staticmethod(lambda _device=None: None))
    properties = [torch.cuda.get_device_properties(0)] * torch.cuda.device_count()
    patches.set(device_interface, "caching_worker_device_properties", {"cuda": properties})
    hints.DeviceProperties.create.cache_clear()
    folder = joint_graph.UniformValueConstantFolder
    fold: Any = folder.run

    def fold_on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Constants of a graph are computed as it is compiled."""
        with OnHost():  # type: ignore[no-untyped-call]
            return fold(self, *args, **kwargs)

    patches.set(folder, "run", fold_on_host)
    # Triton's kernels are written here and never compiled: it need not be installed.
    patches.set(scheduler, "has_triton", lambda: True)
    patches.set(_triton, "triton_hash_with_backend", lambda: "memplan")
    kernel: Any = triton_split_scan.TritonSplitScanKernel
    scan = kernel.scan

    def scan_without_triton(*args: Any) -> Any:
        """Of Triton it asks how many bits a type has."""
        if sys.modules.get("triton.language") is not None:
            return scan(*args)
        hidden = {name: sys.modules[name] for name in _LANGUAGE if name in sys.modules}
        sys.modules.update(_LANGUAGE)
        try:
            return scan(*args)
        finally:
            for name in _LANGUAGE:
                del sys.modules[name]
            sys.modules.update(hidden)  # with None where an import is forbidden

    patches.set(kernel, "scan", scan_without_triton)


def _exchanged(index: int) -> int:
    """Make a device the current one; the one that was."""
    entered: Any = torch.cuda.device(index)
    entered.__enter__()
    return int(entered.prev_idx)


class _Bits:
    """`triton.language` as far as types by their names."""

    def __getattr__(self, name: str) -> Any:
        bits = name.lstrip(string.ascii_letters)
        if not bits.isdecimal():  # imports ask for `__spec__`
            raise AttributeError(name)
        return types.SimpleNamespace(primitive_bitwidth=int(bits))


_LANGUAGE: dict[str, Any] = {
    "triton.language": _Bits(),
    "triton": types.SimpleNamespace(language=_Bits()),
}
