"""What a generation gives: completions of the greatest length, of tokens of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .logprobs import Logprob


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    _decode: Callable[[list[int]], str] = field(repr=False)
    cumulative_logprob: float | None = None
    finish_reason: str | None = "length"
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """The text by the model's tokenizer."""
        return self._decode(self.token_ids)

    def finished(self) -> bool:
        """Whether there will be no more tokens."""
        return True


@dataclass
class RequestOutput:
    """The completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: None = None
    finished: bool = True
