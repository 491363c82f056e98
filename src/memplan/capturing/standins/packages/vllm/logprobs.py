"""Probabilities of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    """The log probability of one token, and its rank among all."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
