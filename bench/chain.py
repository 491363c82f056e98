"""How fast checkpoints on a chain are chosen, and how well (`chain.json`): a chain of a million
layers by the linear algorithm, the same chain's start by the recurrence as it stands, equal layers
against segments of equal length, and the first objective on a short chain."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.results import write_result
from memplan.recompute.chain import (
    Chain,
    Layers,
    chain_of_layers,
    is_monotone,
    least_first_objective,
    least_peak,
    recurrence,
    walk_peak,
)

LAYERS = 1_000_000
BASELINE_LAYERS = 5_000
FIRST_LAYERS = 100
EQUAL_LAYERS = 2_500
REPEATS = 5


def random_chain(layers: int) -> Chain:
    """Layers of any size that save their input and a little more; gradients as large as values."""
    rng = np.random.default_rng(2025)
    output = rng.integers(1 << 10, 1 << 20, layers + 1)
    return chain_of_layers(
        Layers(
            output=output,
            reads_input=np.ones(layers, np.bool_),
            reads_output=np.zeros(layers, np.bool_),
            saved=rng.integers(0, 1 << 18, layers),
            gradient=output,
            weight_gradient=rng.integers(0, 1 << 8, layers),
            forward_scratch=np.zeros(layers, np.int64),
            backward_scratch=rng.integers(0, 1 << 16, layers),
        )
    )


def equal_chain(layers: int) -> Chain:
    """Layers that save their input, one byte each."""
    ones, zeros = np.ones(layers + 1, np.int64), np.zeros(layers, np.int64)
    flags = np.ones(layers, np.bool_)
    return chain_of_layers(
        Layers(
            output=ones,
            reads_input=flags,
            reads_output=~flags,
            saved=zeros,
            gradient=ones,
            weight_gradient=zeros,
            forward_scratch=zeros,
            backward_scratch=zeros,
        )
    )


def equal_segments_peak(chain: Chain) -> int:
    """The best of all segment lengths that are the same throughout."""
    count = len(chain)
    lengths = range(1, 3 * math.isqrt(count))
    return min(walk_peak(chain, range(length, count, length)) for length in lengths)


def median_seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure() -> dict[str, Any]:
    chain = random_chain(LAYERS)
    short = random_chain(BASELINE_LAYERS)
    first = random_chain(FIRST_LAYERS)
    equal = equal_chain(EQUAL_LAYERS)
    found = least_peak(chain)
    plain = least_peak(short)
    return {
        "layers": LAYERS,
        "monotone": is_monotone(chain),
        "seconds": median_seconds(lambda: least_peak(chain)),
        "peak_bytes": found.cost,
        "bound_bytes": found.bound,
        "checkpoints": len(found.solution.checkpoints),
        "recurrence": {
            "layers": BASELINE_LAYERS,
            "seconds": median_seconds(lambda: recurrence(short)),
            "linear_seconds": median_seconds(lambda: least_peak(short)),
            "peak_bytes": recurrence(short).cost,
            "linear_peak_bytes": plain.cost,
        },
        "first_objective": {
            "layers": FIRST_LAYERS,
            "seconds": median_seconds(lambda: least_first_objective(first)),
            "peak_bytes": walk_peak(first, least_first_objective(first).solution.checkpoints),
            "traced_peak_bytes": least_peak(first).cost,
        },
        "equal_layers": {
            "layers": EQUAL_LAYERS,
            "peak": least_peak(equal).cost,
            "equal_segments_peak": equal_segments_peak(equal),
        },
    }


def main() -> None:
    print(write_result("chain", measure()).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
