"""Settings of an engine, in the forms that vLLM takes (`engine/arg_utils.py`)."""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral
from typing import Any

FITTING = -1
"""The length of a sequence is what the KV cache has room for, at most the model's own."""
_FACTORS = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", 1)},
}
_LENGTH = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kmgtKMGT]?)", re.ASCII)


def share(value: Any) -> float:
    """A share of the card. Raises ValueError for one outside (0, 1]."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = 0.0
    if not 0 < found <= 1:
        raise ValueError(
            f"gpu_memory_utilization: {value!r} should be a number greater than 0 and less than or "
            "equal to 1"
        )
    return found


def longest(value: Any) -> int | None:
    """Tokens of a sequence; `FITTING` for -1 and `auto`, None for the model's own. Raises
    ValueError for what is no length."""
    if value is None:
        return None
    if isinstance(value, Integral):
        found = Fraction(int(value))
    elif isinstance(value, str) and value.lower() in ("auto", "-1"):
        found = Fraction(FITTING)
    elif isinstance(value, str) and (match := _LENGTH.fullmatch(value)):
        found = Fraction(match[1]) * _FACTORS.get(match[2], 1)
    else:
        found = Fraction(0)
    if found.denominator != 1 or (found < 1 and found != FITTING):
        raise ValueError(
            f"max_model_len: {value!r} should be a whole number of tokens from 1 on, such as 4096, "
            "'4k' (4000) or '4K' (4096); or -1 or 'auto' for what the KV cache has room for"
        )
    return int(found)
