"""RAM of the node of a job that needs most: the sum over its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from memplan.types.estimate import Estimate


class HostBytes(NamedTuple):
    """Host memory of one process, or of all processes of a node."""

    peak: int
    low: int
    high: int


def host_of(estimate: Estimate) -> HostBytes | None:
    """What one rank's process needs; None where its trace did not follow the host."""
    peak, low, high = estimate.host_peak_bytes, estimate.host_low_bytes, estimate.host_high_bytes
    if peak is None or low is None or high is None:
        return None
    return HostBytes(peak, low, high)


def node_host(captured: Mapping[int, Estimate], size: int, local_size: int) -> HostBytes | None:
    """Sums of the node with the largest; None where the host was not followed.

    Ranks fill one node after the other. One that was not captured lies between two that were, the
    first and the last always being captured, and is taken to need what the larger of them does.
    """
    found = {rank: host_of(estimate) for rank, estimate in captured.items()}
    known = {rank: host for rank, host in found.items() if host is not None}
    if known.keys() != captured.keys() or not {0, size - 1} <= known.keys():
        return None
    hosts = [known[0]]
    for a, b in pairwise(sorted(known)):
        hosts += [max(known[a], known[b])] * (b - a - 1) + [known[b]]
    return max(_sum(hosts[start : start + local_size]) for start in range(0, size, local_size))


def _sum(hosts: list[HostBytes]) -> HostBytes:
    return HostBytes(*(sum(column) for column in zip(*hosts, strict=True)))
