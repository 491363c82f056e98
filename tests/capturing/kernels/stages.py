"""What a kernel's scratch memory comes to."""

from __future__ import annotations

from collections.abc import Iterable

from memplan.capturing.kernels.model import Scratch


def peak(scratches: Iterable[Scratch]) -> tuple[int, int, int]:
    """Largest sum of (low, bytes, high) over the stages of one call."""
    rows = list(scratches)
    best = (0, 0, 0)
    for stage in {row.begin for row in rows}:
        live = [r for r in rows if r.begin <= stage < r.end]
        best = max(
            best,
            (sum(r.low for r in live), sum(r.bytes for r in live), sum(r.high for r in live)),
            key=lambda sums: sums[1],
        )
    return best
