"""Operators that CUDA runs as one kernel and that a PyTorch without CUDA takes apart.

Where the device's backend has no kernel of its own, PyTorch falls back on the operator's
composition of others, whose intermediate results no GPU ever makes: six of them for each SiLU in
the backward pass. Once the backend has one, autograd takes the operator whole.
"""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("_fused_rms_norm", "silu_backward", "mish_backward")
"""All that `native_functions.yaml` gives both a composition and a kernel for CUDA."""


def install() -> torch.library.Library:
    """Register them for fake CUDA; the library must stay alive."""
    library = torch.library.Library("aten", "IMPL")
    for name in _NAMES:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _never, "CUDA")
    return library


def _never(*_arguments: Any) -> Any:
    raise AssertionError("a fake tensor's kernel was run")
