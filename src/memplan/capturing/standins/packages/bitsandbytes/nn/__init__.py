"""Layers."""

from __future__ import annotations

from . import modules
from .modules import (
    Embedding,
    Int8Params,
    Linear4bit,
    Linear8bitLt,
    LinearFP4,
    LinearNF4,
    Params4bit,
    StableEmbedding,
)

__all__ = [
    "Embedding",
    "Int8Params",
    "Linear4bit",
    "Linear8bitLt",
    "LinearFP4",
    "LinearNF4",
    "Params4bit",
    "StableEmbedding",
    "modules",
]
