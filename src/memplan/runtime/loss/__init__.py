"""A loss over a large vocabulary, computed a few rows of logits at a time."""

from memplan.runtime.loss.in_effect import ChunkedLoss

__all__ = ["ChunkedLoss"]
