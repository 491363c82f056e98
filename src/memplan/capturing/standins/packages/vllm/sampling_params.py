"""How tokens are chosen: only their number, and whether probabilities are asked for, matter."""

from __future__ import annotations

from typing import Any


class StructuredOutputsParams:
    """A grammar that completions keep to."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


class SamplingParams:
    """Settings of a request."""

    def __init__(
        self,
        n: int = 1,
        *,
        max_tokens: int | None = 16,
        logprobs: int | None = None,
        **settings: Any,
    ) -> None:
        """Raises ValueError, as vLLM does, for a number of completions or tokens below 1."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}.")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        self.n, self.max_tokens, self.logprobs = n, max_tokens, logprobs
        vars(self).update(settings)
