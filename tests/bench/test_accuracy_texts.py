"""The text lengths behind PEFT's percentile."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest

from bench.accuracy.text_lengths import BATCH, METAMATH, STEPS, Corpus, longest_at_percentile


def test_the_distribution_has_the_published_mean_and_maximum() -> None:
    shares = [(draw + 0.5) / 20_000 for draw in range(20_000)]
    lengths = [METAMATH.tokens_exceeded_by(share) for share in shares]
    assert mean(lengths) == pytest.approx(METAMATH.mean_tokens, rel=0.001)
    assert METAMATH.tokens_exceeded_by(1 / METAMATH.texts) == pytest.approx(768)


def test_the_percentile_is_what_simulated_buckets_give() -> None:
    corpus = Corpus(mean_tokens=200, longest_tokens=900, texts=1e6)
    draws = random.Random(7)
    percentiles = []
    for _ in range(6):
        texts = [corpus.tokens_exceeded_by(1 - draws.random()) for _ in range(STEPS * BATCH)]
        reserved = []
        for bucket in range(0, len(texts), 80):
            by_length = sorted(texts[bucket : bucket + 80], reverse=True)
            reserved += [by_length[0]] * 10 + [by_length[40]] * 10
        percentiles.append(sorted(reserved)[math.ceil(0.99 * len(reserved)) - 1])
    assert longest_at_percentile(corpus, 99) == pytest.approx(mean(percentiles), rel=0.02)
