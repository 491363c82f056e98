"""Every subset of checkpoints, each by the walk: the oracle of both algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain as concatenated
from itertools import combinations

from memplan.recompute.chain.model import Chain
from memplan.recompute.chain.walk import walk_peak

MOST_LAYERS = 16


def least_peak_of_all(
    chain: Chain, peak: Callable[[Chain, Iterable[int]], int] = walk_peak
) -> tuple[int, tuple[int, ...]]:
    """The least peak in bytes and the first of the smallest subsets of boundaries that has it.
    Takes 2^(n - 1) walks; raises ValueError beyond 16 layers."""
    if len(chain) > MOST_LAYERS:
        raise ValueError(f"a chain of {len(chain)} layers has too many subsets to try")
    inner = range(1, len(chain))
    subsets = concatenated.from_iterable(
        combinations(inner, size) for size in range(len(inner) + 1)
    )
    return min(((peak(chain, subset), subset) for subset in subsets), key=lambda found: found[0])
