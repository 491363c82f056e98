"""Buffers on the host that a package makes by itself, for what is on the device and in the model.

Tensors that a script makes on the host are real: they are its data. Buffers of DeepSpeed's ZeRO
under offload, and those in which Megatron-LM's distributed optimizer gathers its states for a
checkpoint, are as large as the model and its optimizer's states, and only ever hold those, so they
are fake as well: a real one would need the job's RAM here.
"""

from __future__ import annotations

import math
from types import FrameType
from typing import Any

import torch

aten = torch.ops.aten

FACTORIES = frozenset({aten.empty.memory_format, aten.zeros.default, aten.full.default})
"""What they are made with; the first argument is the shape."""
_MAKERS = ("deepspeed.runtime.zero.", "megatron.core.optimizer.")
_SMALLEST = 64 << 10
"""Elements. Smaller ones stay real: their values may be looked at."""


def holds_no_data(args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> bool:
    """Whether a factory that is called from `frame` makes such a buffer."""
    device = kwargs.get("device")
    return (
        frame is not None
        and (device is None or torch.device(device).type == "cpu")
        and str(frame.f_globals.get("__name__", "")).startswith(_MAKERS)
        and math.prod(args[0]) >= _SMALLEST
    )
