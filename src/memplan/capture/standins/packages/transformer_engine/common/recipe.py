"""How tensors are scaled for fp8."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Format(Enum):
    """Of activations and weights, and of gradients."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


class Recipe:
    """Base of recipes."""


@dataclass
class DelayedScaling(Recipe):
    """Scales from a history of the largest values."""

    margin: int = 0
    interval: int = -1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling(Recipe):
    """Scales from the tensor itself."""

    fp8_format: Format = Format.HYBRID


@dataclass
class MXFP8BlockScaling(Recipe):
    """A scale for each 32 values."""

    fp8_format: Format = Format.E4M3
