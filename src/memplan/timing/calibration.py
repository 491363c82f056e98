"""Efficiencies of a card of the user's own, from kernels that were timed on it one by one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np

from memplan.timing.seconds import IN_L2, joined, peak_rates
from memplan.timing.table import KernelTime, kernel_times
from memplan.timing.workload import workload
from memplan.types.device import DeviceProfile
from memplan.types.trace import Trace

_LAUNCHES = 5
"""Kernels up to so many times as long as the gap between two say nothing about their class."""


def efficiencies(
    timed: Iterable[tuple[Trace, float]], profile: DeviceProfile
) -> dict[str, KernelTime]:
    """By class, what its kernels reach of the card's data sheet. `timed`: an operator that runs one
    kernel, as a trace, and its seconds; others are left out, for which of its kernels took how long
    is not known.

    A class's two numbers are those of the table, divided by how much longer than with them a kernel
    took: `compute` by kernels that arithmetic bounds, `memory` by those that traffic bounds, and
    each by the others where there is none.
    """
    table, card = kernel_times(), msgspec.structs.replace(profile, kernels={})
    launch = table.launch_us * 1e-6
    faster: dict[str, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace, seconds in timed:
        work = workload(trace, card.sm_count)
        if len(work.kind) != 1 or work.nbytes[0] <= IN_L2 * card.l2_bytes:
            continue
        now = table.on(work.kind[0], card)
        arithmetic = work.flops / (peak_rates(work.rate, card) * now.compute)
        traffic = work.nbytes / (card.memory_bandwidth_bytes_per_second * now.memory)
        expected = float(joined(arithmetic, traffic, 0.0)[0])
        if min(expected, seconds) > _LAUNCHES * launch:
            by_arithmetic = bool(arithmetic[0] > traffic[0])
            faster[work.kind[0]][by_arithmetic].append(expected / (seconds - launch))
    found = {}
    for kind, by in sorted(faster.items()):
        now = table.on(kind, card)
        compute, memory = (_mean(by[bound] or by[not bound]) for bound in (True, False))
        found[kind] = KernelTime(_rounded(now.compute * compute), _rounded(now.memory * memory))
    return found


def _rounded(share: float) -> float:
    """A number rounded to three digits, however small it is."""
    return float(f"{share:.3g}")


def _mean(ratios: list[float]) -> float:
    return math.exp(float(np.mean(np.log(ratios))))
