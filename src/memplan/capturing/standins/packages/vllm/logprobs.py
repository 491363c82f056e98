"""Probabilities of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    """Of one token, and its place among all."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
