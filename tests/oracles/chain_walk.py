"""A chain's step, allocation by allocation: the slow, obvious check of `least_peak`.

It keeps a bag of what is alive and shares nothing with the formulas but the chain's columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from memplan.recompute.chain import Chain


def walk_peak(chain: Chain, checkpoints: Iterable[int]) -> int:
    """Peak bytes of a step that keeps the boundaries `checkpoints` (of 1..n-1; the input is always
    kept) and replays all that lies between them but the last segment, which it never dropped.
    Checkpoints die as the backward passes them. Raises ValueError for other boundaries."""
    return _Walk(chain, checkpoints).run()


def least_peak_of_all(chain: Chain) -> int:
    """Of every subset of boundaries. Raises ValueError for more than 2^15 of them."""
    inner = range(1, len(chain))
    if len(inner) > 15:
        raise ValueError(f"too many subsets of {len(inner)} boundaries")
    subsets = (subset for size in range(len(inner) + 1) for subset in combinations(inner, size))
    return min(walk_peak(chain, subset) for subset in subsets)


class _Walk:
    def __init__(self, chain: Chain, checkpoints: Iterable[int]) -> None:
        self.chain = chain
        self.count = len(chain)
        self.starts = [0, *sorted(set(checkpoints) - {0})]
        if any(not 0 <= c < max(self.count, 1) for c in self.starts):
            raise ValueError(f"checkpoints {self.starts} on a chain of {self.count} layers")
        self.alive: dict[str, int] = {"y0": int(chain.output[0])}
        self.peak = self.total()

    def size(self, boundary: int) -> int:
        return int(self.chain.output[boundary])

    def is_saved(self, boundary: int) -> bool:
        return bool(self.chain.output_saved[boundary])

    def total(self) -> int:
        return sum(self.alive.values())

    def see(self, extra: int) -> None:
        self.peak = max(self.peak, self.total() + int(extra))

    def segments(self) -> list[tuple[int, int]]:
        """(start, end) of layers start + 1..end, the last first."""
        return list(zip(self.starts, [*self.starts[1:], self.count], strict=True))[::-1]

    def run(self) -> int:
        for k in range(1, self.count + 1):
            self.forward(k)
        for start, end in self.segments():
            if end < self.count:
                self.replay(start, end)
            for k in range(end, start, -1):
                self.alive.pop(f"y{k}", None)
                self.alive.pop(f"z{k}", None)
                plain = end == self.count
                self.see((self.chain.backward_saved if plain else self.chain.backward)[k - 1])
        return self.peak

    def forward(self, k: int) -> None:
        last = self.starts[-1]
        self.see((self.chain.forward_saving if k > last else self.chain.forward)[k - 1])
        self.alive[f"y{k}"] = self.size(k)
        if k > last:
            self.alive[f"z{k}"] = int(self.chain.saved[k - 1])
        if not self.outlives(k - 1):
            del self.alive[f"y{k - 1}"]

    def outlives(self, boundary: int) -> bool:
        """Whether it is alive after the layer that follows it has run."""
        last = self.starts[-1]
        if boundary == 0 or (boundary in self.starts and boundary < last):
            return True
        return boundary >= last and self.is_saved(boundary)

    def replay(self, start: int, end: int) -> None:
        """Layers start + 1..end, as far as somebody wants what they make."""
        whole: dict[int, bool] = {}
        wanted = False
        for k in range(end, start, -1):
            whole[k] = wanted or (k < end and self.is_saved(k))
            wanted = whole[k] or self.chain.saved[k - 1] > 0
            if not wanted:
                del whole[k]
        self.alive.pop(f"y{end}", None)
        self.alive["entry"] = int(self.chain.entry[end - 1])
        for k in sorted(whole):
            self.see((self.chain.replay if whole[k] else self.chain.replay_saved)[k - 1])
            self.alive[f"z{k}"] = int(self.chain.saved[k - 1])
            if whole[k]:
                self.alive[f"y{k}"] = self.size(k)
            if k - 1 > start and not self.is_saved(k - 1):
                del self.alive[f"y{k - 1}"]
        del self.alive["entry"]
        self.alive.pop(f"z{end}", None)
        self.see(self.chain.backward_first[end - 1])
        if start > 0 and not self.is_saved(start):
            del self.alive[f"y{start}"]
