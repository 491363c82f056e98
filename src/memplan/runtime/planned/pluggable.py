"""Makes the library the CUDA allocator of PyTorch, as a pluggable allocator."""

from __future__ import annotations

import torch

from memplan.runtime.planned.library import Library
from memplan.types.errors import UsageError

MALLOC, FREE = "memplan_torch_malloc", "memplan_free"
"""The first raises when memory is out; PyTorch would take NULL for a tensor."""


def why_not() -> str:
    """Why this process cannot use the planned allocator; the empty string where it can."""
    if torch.version.hip is not None:
        return "PyTorch is built for ROCm, and the planned allocator is for CUDA"
    if torch.version.cuda is None or not hasattr(torch._C, "_cuda_customAllocator"):
        return "PyTorch is built without CUDA"
    if torch.cuda.device_count() == 0:
        return "no GPU here"
    return ""


def check_not_started() -> None:
    """Raises UsageError once CUDA has begun: its allocator cannot be replaced any more."""
    if torch.cuda.is_initialized():
        raise UsageError(
            "CUDA is already initialised in this process, so its allocator cannot be replaced",
            "memplan.install(plan) before the first use of CUDA, or memplan run --plan PLAN SCRIPT",
        )


def use(library: Library) -> None:
    """Make the library the CUDA allocator of this process, for good."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library.path), MALLOC, FREE)
    native = allocator.allocator()
    # Without it memory that another stream uses would be given away: no number would be safe.
    native.set_record_stream_fn(library.address_of("memplan_record_stream"))
    native.set_reset_fn(library.address_of("memplan_torch_empty_cache"))
    torch.cuda.memory.change_current_allocator(allocator)
