"""The longest text that a percentile of a run saw, from what its authors say of the corpus.

PEFT's method comparison (MetaMathQA) publishes neither its texts nor their lengths. It does publish
the tokens of a run, the texts that its filter keeps, the most tokens that such a text has, and how
it makes batches: enough for both parameters of a log-normal distribution of text lengths, and for
the rank that the 99th percentile of the reserved memory picks. No measured byte is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Corpus:
    """What is published of a corpus: mean tokens of a text, most tokens of any, number of texts."""

    mean_tokens: float
    longest_tokens: int
    texts: float

    def tokens_exceeded_by(self, share: float) -> float:
        """The length in tokens that this share (0 to 1) of the texts exceeds: log-normal.

        The spread follows from the longest of `texts` draws, whose expected rank is one in `texts`.
        """
        rank = NormalDist().inv_cdf(1 - 1 / self.texts)
        spread = rank - math.sqrt(rank**2 - 2 * math.log(self.longest_tokens / self.mean_tokens))
        median = math.log(self.mean_tokens) - spread**2 / 2
        return math.exp(median + spread * NormalDist().inv_cdf(1 - share))


METAMATH = Corpus(
    # "train total tokens" of 20,000 texts, less the end token counted with each (results/*.json)
    mean_tokens=4_198_051 / 20_000 - 1,
    # the filter's characters were chosen so that no kept text has more (data.py)
    longest_tokens=768,
    # 93.8 % of MetaMathQA's 395,000 texts are kept (data.py)
    texts=0.938 * 395_000,
)

STEPS, BATCH, BATCHES_A_BUCKET, EMPTY_CACHE_EVERY = 5_000, 4, 20, 10
"""PEFT's run.py and its default parameters."""


def longest_at_percentile(corpus: Corpus, percentile: float) -> int:
    """Tokens of the text that sets the given percentile of the memory reserved after each step.

    A bucket's first batch holds its longest text, and what it reserves stays until the cache is
    emptied. So the percentile picks, of all buckets' longest texts, the n-th longest; texts that
    are rarer than buckets fall into different ones, which makes it the run's n-th longest too.
    """
    above = STEPS * (1 - percentile / 100) / EMPTY_CACHE_EVERY
    return round(corpus.tokens_exceeded_by(above / (STEPS * BATCH)))
