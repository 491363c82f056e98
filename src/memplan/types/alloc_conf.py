"""Where PyTorch's CUDA allocator gets its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping

CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the allocator's settings; the first that is set wins."""
_COMMA = re.compile(r",(?![^\[]*\])")
"""Outside brackets."""


def conf_in(environment: Mapping[str, str]) -> str:
    """The settings that an environment asks for; empty for PyTorch's own."""
    return next((environment[name] for name in CONF_VARIABLES if name in environment), "")


def merged(conf: str, option: str | None) -> str:
    """`conf` with the keys of `option` in place of its own."""
    pairs = [pair.strip() for pair in _COMMA.split(f"{conf},{option or ''}") if pair.strip()]
    return ",".join({_key(pair): pair for pair in pairs}.values())


def _key(pair: str) -> str:
    return pair.partition(":")[0].strip()
