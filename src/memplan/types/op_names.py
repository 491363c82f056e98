"""Operators as traces and plans name them."""

from __future__ import annotations

from functools import cache
from typing import Any

_SAME = {
    "aten.cudnn_batch_norm.default": "aten.native_batch_norm.default",
    "aten.cudnn_grid_sampler.default": "aten.grid_sampler_2d.default",
}
"""Operators that PyTorch takes in another's place where cuDNN is there, with the other's outputs
first. A plan made on a machine without a GPU must find them, and count them, on one with it."""

FETCH = "memplan.fetch.default"
"""In a trace: a weight is copied from the host to the device."""


@cache
def op_name(func: Any) -> str:
    """The name of an operator's overload, such as `aten.mm.default`."""
    name = str(func)
    return _SAME.get(name, name)
