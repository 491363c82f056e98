"""Which ranks of a job to capture, so that no rank that may need more memory is left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

from memplan.types.trace import EventKind, Trace

MOST_CAPTURES = 6
"""Both ends, two more, and two in the widest gaps between ranks that differ."""


@dataclass(frozen=True)
class Requests:
    """What a rank asks of its GPU: how often, a digest of sizes and streams in order, and the high
    bound of its peak, which also holds what the allocator never sees."""

    count: int
    digest: bytes
    high_bytes: int


def requests_of(trace: Trace, high_bytes: int) -> Requests:
    events = trace.events
    asked = events.kind == EventKind.ALLOC
    digest = blake2b(digest_size=16)
    for column in (events.bytes, events.bytes_low, events.bytes_high, events.stream):
        digest.update(column[asked].tobytes())
    return Requests(int(asked.sum()), digest.digest(), high_bytes)


def next_ranks(seen: Mapping[int, Requests], size: int) -> dict[int, str]:
    """The ranks of a job of `size` to capture next, each with the reason; empty when enough is
    known.

    The first and the last come first: where they ask for the same, so do all between them. Else
    one that is neither first nor last of the first node and the middle one, and then, as long as
    neighbours run different programs, the rank halfway between the two that are farthest apart.
    Neighbours with the same number of requests differ in sizes only, as shards do that are not
    even, and those between them need no more than the larger of the two.
    """
    last = size - 1
    first_two = {0: "first rank", last: "last rank"}
    if not seen.keys() >= first_two.keys():
        return {rank: why for rank, why in first_two.items() if rank not in seen}
    if seen[0] == seen[last] or len(seen) >= MOST_CAPTURES:
        return {}
    second = {1: "second rank", size // 2: "middle rank"}
    if not seen.keys() >= second.keys():
        return {rank: why for rank, why in second.items() if rank not in seen}
    gaps = [
        (b - a, a, b)
        for a, b in pairwise(sorted(seen))
        if b - a > 1 and seen[a].count != seen[b].count
    ]
    if not gaps:
        return {}
    _, a, b = max(gaps, key=lambda gap: (gap[0], -gap[1]))
    return {(a + b) // 2: f"between ranks {a} and {b}, which differ"}


def alike(seen: Mapping[int, Requests], size: int) -> dict[int, list[int]]:
    """All ranks of the job, by the first captured one that asks for the same. A rank that was not
    captured counts to the larger of its captured neighbours."""
    captured = sorted(seen)
    firsts: dict[Requests, int] = {}
    for rank in captured:
        firsts.setdefault(seen[rank], rank)
    found: dict[int, list[int]] = {first: [] for first in firsts.values()}
    for rank in range(size):
        place = bisect_left(captured, rank)
        near = captured[place : place + 1] if rank in seen else captured[place - 1 : place + 1]
        largest = max((seen[one] for one in near), key=lambda one: one.high_bytes)
        found[firsts[largest]].append(rank)
    return found


def uncaptured(seen: Mapping[int, Requests], size: int) -> list[str]:
    """What is taken for granted of the ranks that were not captured, one sentence a stretch."""
    said = []
    for a, b in pairwise(sorted(seen)):
        if b - a < 2:
            continue
        names = _between(a, b)
        if seen[a] == seen[b]:
            said.append(
                f"{names}: taken to be like {a} and {b}, which ask for the same memory; one that "
                f"holds larger shapes is not seen, and --rank {(a + b) // 2} captures one"
            )
        elif seen[a].count == seen[b].count:
            said.append(
                f"{names}: taken to need no more than {a} or {b}, which differ in sizes; "
                f"--rank {(a + b) // 2} captures one"
            )
        else:
            said.append(
                f"{names}: not captured, between ranks {a} and {b} that differ; "
                f"--rank {(a + b) // 2} captures one"
            )
    return said


def _between(a: int, b: int) -> str:
    if b - a == 2:
        return f"rank {a + 1}"
    return f"ranks {a + 1} {'and' if b - a == 3 else 'to'} {b - 1}"
