"""A real run beside the estimate of the same job: peaks, and the first request that differs."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from memplan import __version__
from memplan.phases import find_steps
from memplan.types.estimate import Estimate
from memplan.types.trace import EventKind, Trace
from memplan.types.verification import Comparison, Divergence, Request, Surplus, Verification

_SURPLUS = 10
_PLACES = 3


def verify(
    real: Trace, foreseen: Trace, estimate: Estimate, measured: dict[str, Any], device: int = 0
) -> Verification:
    """Compare a recorded run with a captured one.

    Args:
        real: the run's allocator history; `foreseen`: the captured job that `estimate` is about.
        measured: what `memplan.runtime.measure` wrote, with `nvml_peak_bytes` where that is known.
    """
    theirs, ours = _allocations(real, device), _allocations(foreseen, device)
    first = _first(real, theirs, foreseen, ours)
    # The run may have been ended earlier, or later, than the capture.
    at_end = first is not None and (first.real is None or first.foreseen is None)
    steps = _steady(real, device), _steady(foreseen, device)
    steady = None
    if steps[0] is not None and steps[1] is not None:
        steady = _first(real, steps[0], foreseen, steps[1])
    peaks = _peaks(estimate, measured)
    process = measured.get("nvml_peak_bytes")
    return Verification(
        memplan_version=__version__,
        torch_version=measured.get("torch", ""),
        device_name=measured.get("device_name", ""),
        gpu=estimate.gpu,
        holds=all(one.real_bytes <= one.high_bytes for one in peaks),
        peaks=peaks,
        requests_real=len(theirs),
        requests_foreseen=len(ours),
        first=None if at_end else first,
        steady=steady,
        steady_compared=steps[0] is not None and steps[1] is not None,
        surplus=_surplus(real, theirs, foreseen, ours),
        outside_bytes=None if process is None else process - measured["max_memory_reserved"],
        num_alloc_retries=measured.get("num_alloc_retries", 0),
        calibrated="",
        notes=_notes(real, foreseen, measured),
    )


def _allocations(trace: Trace, device: int) -> list[int]:
    events = trace.events
    rows = np.flatnonzero((events.kind == EventKind.ALLOC) & (events.device == device))
    return [int(row) for row in rows]


def _steady(trace: Trace, device: int) -> list[int] | None:
    """Rows of the allocations of the first step that the next one repeats."""
    steps = find_steps(trace)
    if steps.steady is None:
        return None
    start, stop = steps[steps.steady]
    return [row for row in _allocations(trace, device) if start <= row < stop]


def _first(real: Trace, theirs: list[int], foreseen: Trace, ours: list[int]) -> Divergence | None:
    """The first request whose bytes differ: those decide what an allocator does."""
    a, b = real.events.bytes[theirs], foreseen.events.bytes[ours]
    common = min(len(a), len(b))
    different = np.flatnonzero(a[:common] != b[:common])
    if not len(different) and len(a) == len(b):
        return None
    index = int(different[0]) if len(different) else common
    one = _request(real, theirs[index]) if index < len(a) else None
    other = _request(foreseen, ours[index]) if index < len(b) else None
    more = (one.bytes if one else 0) - (other.bytes if other else 0)
    return Divergence(index=index, real=one, foreseen=other, bytes=more)


def _request(trace: Trace, row: int) -> Request:
    view = trace.event(row)
    return Request(
        bytes=view.bytes,
        op=view.op,
        module=view.module,
        source=view.source,
        phase=view.phase.name.lower(),
        step=view.step,
        provenance=view.provenance.name.lower(),
    )


def _peaks(estimate: Estimate, measured: dict[str, Any]) -> list[Comparison]:
    e = estimate
    intervals = {
        "allocated": (
            "max_memory_allocated",
            (e.allocated_low_bytes, e.allocated_peak_bytes, e.allocated_high_bytes),
        ),
        "reserved": (
            "max_memory_reserved",
            (e.reserved_low_bytes, e.reserved_peak_bytes, e.reserved_high_bytes),
        ),
        "process": ("nvml_peak_bytes", (e.low_bytes, e.peak_bytes, e.high_bytes)),
    }
    return [
        Comparison(
            name=name,
            real_bytes=measured[key],
            low_bytes=low,
            expected_bytes=expected,
            high_bytes=high,
            held=low <= measured[key] <= high,
        )
        for name, (key, (low, expected, high)) in intervals.items()
        if measured.get(key) is not None
    ]


def _surplus(real: Trace, theirs: list[int], foreseen: Trace, ours: list[int]) -> list[Surplus]:
    more = Counter(real.events.bytes[theirs].tolist())
    more.subtract(foreseen.events.bytes[ours].tolist())
    ranked = sorted(
        ((nbytes, times) for nbytes, times in more.items() if times),
        key=lambda item: -item[0] * abs(item[1]),
    )[:_SURPLUS]
    return [
        Surplus(
            bytes=nbytes,
            times=times,
            places=_places(real, theirs, nbytes) if times > 0 else _places(foreseen, ours, nbytes),
        )
        for nbytes, times in ranked
    ]


def _places(trace: Trace, rows: list[int], nbytes: int) -> list[str]:
    """The places that ask for a size, the most frequent first."""
    found: dict[str, int] = defaultdict(int)
    for row in rows:
        if trace.events.bytes[row] == nbytes:
            one = _request(trace, row)
            found[" ".join(filter(None, (one.op, one.source)))] += 1
    return [place for place in sorted(found, key=lambda p: -found[p]) if place][:_PLACES]


def _notes(real: Trace, foreseen: Trace, measured: dict[str, Any]) -> list[str]:
    notes = []
    ran, seen = real.meta.optimizer_steps, foreseen.meta.optimizer_steps
    if measured.get("error"):
        notes.append(f"the script failed: {measured['error'].strip().splitlines()[-1]}")
    if ran and seen and ran != seen:
        notes.append(f"the run made {ran} optimizer steps, the capture {seen}: only what both did "
                     "is compared in order")  # fmt: skip
    if measured.get("num_alloc_retries"):
        notes.append("the card was full: cached segments were given back to go on")
    if measured.get("nvml_peak_bytes") is None:
        notes.append("NVML did not answer, so the process peak was not measured")
    return [*notes, *real.meta.notes]
