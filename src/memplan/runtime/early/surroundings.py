"""What is around a backward pass, and what it is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.capture.patches.deferred_dynamo import has_compiled


def why_not_now(modes: list[Any]) -> str:
    """What is around the backward pass."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "the job runs as one of several ranks"
    if has_compiled():
        return "torch.compile returns gradients all at once"
    if _get_current_dispatch_mode_stack() != modes:
        return "the backward pass runs under a dispatch mode"
    if in_autocast():
        return "the backward pass runs under autocast"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the backward pass is captured as a CUDA graph"
    return ""


def why_not_this(
    _gradients: Any, keep_graph: bool, create_graph: bool, inputs: Any = (), *_: Any
) -> str:
    """What the engine is asked for, beside the roots."""
    if keep_graph or create_graph:
        return "the backward pass keeps its graph"
    return "the backward pass is for chosen inputs" if inputs else ""


def in_autocast() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
