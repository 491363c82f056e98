"""Makes PyTorch trace the same operators that run eagerly.

For some operators (dropout, recurrent cells, interpolation, …) PyTorch has a second implementation,
in Python, that only tracing uses. On the CPU the last bits of its results may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch._decomp  # which registers them
from torch._C import DispatchKey
from torch._inductor import config as inductor_config

from memplan.runtime.graph.workspaces import real_layouts

_OF_TRACING = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Inside, tracing does not use the implementations in Python, and keeps random operators whose
    results are not used, so that generators end in the same state. For traces without symbolic
    sizes, which need those implementations."""
    taken = []
    for operator in _with_python():
        kernels = operator.py_kernels
        taken.append((kernels, {key: kernels.pop(key) for key in _OF_TRACING if key in kernels}))
        operator._dispatch_cache.clear()
    try:
        with real_layouts(), inductor_config.patch(fallback_random=True):
            yield
    finally:
        for kernels, before in taken:
            kernels.update(before)
        for operator in _with_python():
            operator._dispatch_cache.clear()


@cache
def _with_python() -> list[Any]:
    """Operators that have an implementation in Python for tracing."""
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    overloads = (
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    )
    return [one for one in overloads if any(key in one.py_kernels for key in _OF_TRACING)]
