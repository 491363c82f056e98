"""Where PyTorch's CUDA allocator gets its settings."""

from __future__ import annotations

from collections.abc import Mapping

CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Of the environment; the first that is set wins, be it empty."""


def conf_in(environment: Mapping[str, str]) -> str:
    """The settings that an environment asks for; empty for PyTorch's own."""
    return next((environment[name] for name in CONF_VARIABLES if name in environment), "")
