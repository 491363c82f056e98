"""Where the requests that a job really made differ from those that the estimate foresaw."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from memplan.types.trace import EventKind, Trace

AROUND = 4
MOST = 25

Request = tuple[int, str, str, str]
"""Bytes, operator, source line, provenance."""


def requests(trace: Trace, device: int = 0) -> list[Request]:
    """The allocations of a trace in order. Files are named without their folders."""
    events = trace.events
    rows = np.flatnonzero((events.kind == EventKind.ALLOC) & (events.device == device))
    return [
        (view.bytes, view.op, view.source.rsplit("/", 1)[-1], view.provenance.name.lower())
        for view in (trace.event(int(row)) for row in rows)
    ]


def compare_requests(real: list[Request], foreseen: list[Request]) -> dict[str, Any]:
    """The first request that differs, and which sizes occur more often on one side.

    Requests are compared by their bytes alone: what decides the allocator's layout.
    """
    pairs = zip(real, foreseen, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
    if first is None and len(real) != len(foreseen):
        first = min(len(real), len(foreseen))
    result: dict[str, Any] = {
        "requests_real": len(real),
        "requests_foreseen": len(foreseen),
        "first_difference": first,
        "missing": _surplus(real, foreseen),
        "invented": _surplus(foreseen, real),
    }
    if first is not None:
        window = slice(max(0, first - AROUND), first + AROUND + 1)
        result["around"] = {"real": real[window], "foreseen": foreseen[window]}
    return result


def _surplus(these: list[Request], those: list[Request]) -> list[dict[str, Any]]:
    """Sizes that `these` ask for more often than `those`, most bytes first, with an example."""
    more = Counter(one[0] for one in these) - Counter(one[0] for one in those)
    places: dict[int, Counter[tuple[str, str, str]]] = {}
    for nbytes, *place in these:
        if nbytes in more:
            places.setdefault(nbytes, Counter())[(place[0], place[1], place[2])] += 1
    ranked = sorted(more.items(), key=lambda item: -item[0] * item[1])[:MOST]
    return [
        {
            "bytes": nbytes,
            "times": times,
            "places": [[*place, count] for place, count in places[nbytes].most_common(3)],
        }
        for nbytes, times in ranked
    ]
