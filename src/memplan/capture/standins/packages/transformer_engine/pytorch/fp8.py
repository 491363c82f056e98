"""The region in which products run in fp8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..common.recipe import DelayedScaling

_regions: list[Any] = []


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """While entered, modules work in fp8."""
    del calibrating, fp8_group, _graph
    _regions.append((fp8_recipe or DelayedScaling()) if enabled else None)
    try:
        yield
    finally:
        _regions.pop()


@contextmanager
def autocast(enabled: bool = True, recipe: Any = None, **_more: Any) -> Iterator[None]:
    """`fp8_autocast` by its newer name."""
    with fp8_autocast(enabled=enabled, fp8_recipe=recipe):
        yield


@contextmanager
def fp8_model_init(enabled: bool = True, **_more: Any) -> Iterator[None]:
    """Parameters that are fp8 only cannot be followed: their optimizer works elsewhere."""
    if enabled:
        from memplan.types.errors import CaptureError

        raise CaptureError(
            "transformer_engine.pytorch.fp8_model_init cannot be captured: parameters that exist "
            "in fp8 only have no stand-in",
            "leave fp8_model_init out when estimating: parameters are then counted in their dtype",
        )
    yield


def recipe() -> Any:
    """The recipe in force, or None outside fp8."""
    return _regions[-1] if _regions else None


def is_fp8_available() -> tuple[bool, str]:
    """From compute capability 8.9."""
    known = torch.cuda.get_device_capability() >= (8, 9)
    return known, "" if known else "Device compute capability 8.9 or higher required for FP8."
