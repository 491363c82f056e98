"""Operators that CUDA runs as one kernel.

A PyTorch without CUDA takes some of them apart: where the device's backend has no kernel of its
own, PyTorch runs a composition of other operators, with intermediate results that no GPU ever
allocates (six for each SiLU in the backward pass). Once the backend has a kernel, autograd uses the
operator as a whole. In-place multi-tensor operators are one kernel, too, and allocate nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.recording.work import extent
from memplan.capturing.state import CaptureState, Handler

aten = torch.ops.aten

_NAMES = ("_fused_rms_norm", "silu_backward", "mish_backward")
"""All operators for which `native_functions.yaml` has both a composition and a CUDA kernel."""


def in_place(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """In-place operators on lists allocate nothing; a kernel only runs for known values."""
    lists = [item for item in args if isinstance(item, (list, tuple))]
    tensors = [item for group in lists for item in group if isinstance(item, torch.Tensor)]
    known = state.values.knows
    if not all(isinstance(item, FakeTensor) and not known(item) for item in tensors):
        return NotImplemented
    factors = [item for item in args if isinstance(item, torch.Tensor)]  # such as a clipping one
    state.begin_op(func, [*tensors, *factors])
    builder = state.recorder.builder
    builder.op_writes(state.numbers(args[0]))
    # Of a storage that many share (DDP's buckets, a flat parameter) an operator moves its views.
    moved = sum(map(extent, (*tensors, *factors, *args[0])))
    builder.op_work(flops=0, moved_bytes=moved)
    return None


def _in_place_overloads() -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            if packet.endswith("_"):
                yield getattr(getattr(aten, packet), overload or "default")


def install() -> torch.library.Library:
    """Register them for fake CUDA; the library must stay alive."""
    library = torch.library.Library("aten", "IMPL")
    for name in _NAMES:
        if not getattr(aten, name).default.has_kernel_for_dispatch_key("CUDA"):
            library.impl(name, _never, "CUDA")
    return library


def _never(*_arguments: Any) -> Any:
    raise AssertionError("a fake tensor's kernel was run")


HANDLERS: dict[Any, Handler] = dict.fromkeys(_in_place_overloads(), in_place)
