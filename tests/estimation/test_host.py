"""RAM on the host: sums, page-locked blocks and bounds, against totals computed by hand."""

from __future__ import annotations

import pytest

from memplan.estimation import estimate
from memplan.estimation.host import PROCESS_BYTES, PinnedBlocks, host_memory
from memplan.simulate import AllocatorSettings
from memplan.types.builder import TraceBuilder
from memplan.types.trace import HostCapture, HostEventKind, Role, Trace, TraceMeta

MIB = 1 << 20
ALLOC, FREE = HostEventKind.ALLOC, HostEventKind.FREE


def pinned_peak(sizes: list[int], conf: str = "") -> int:
    """Bytes held after storages that begin (positive) and end (negative)."""
    blocks = PinnedBlocks(AllocatorSettings.parse(conf))
    for size in sizes:
        blocks.change(size)
    assert blocks.peak >= blocks.held >= blocks.requested
    return blocks.held


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ([1], 1),
        ([3], 4),
        ([64 * MIB], 64 * MIB),
        ([64 * MIB + 1], 128 * MIB),
        # A block that was freed serves its own power of two, and stays.
        ([5 * MIB, -5 * MIB, 7 * MIB], 8 * MIB),
        ([5 * MIB, -5 * MIB, 3 * MIB], 12 * MIB),
        ([5 * MIB, -5 * MIB, 9 * MIB, -9 * MIB], 24 * MIB),
        ([5 * MIB, 5 * MIB, -5 * MIB, 6 * MIB], 16 * MIB),
    ],
)
def test_pinned_blocks_are_powers_of_two_and_stay(sizes: list[int], held: int) -> None:
    assert pinned_peak(sizes) == held


def test_pinned_settings() -> None:
    request = 65 * MIB
    assert pinned_peak([request], "pinned_max_round_threshold_mb:64") == request
    assert pinned_peak([request, -request], "pinned_max_round_threshold_mb:64") == request
    assert pinned_peak([request], "pinned_max_cached_size_mb:64") == request
    assert pinned_peak([request, -request], "pinned_max_cached_size_mb:64") == 0


def job(*rows: tuple[HostEventKind, int, int, bool, Role], growth: int = 0) -> Trace:
    builder = TraceBuilder()
    for kind, storage, nbytes, pinned, role in rows:
        builder.append_host(kind, storage, nbytes, pinned=pinned, role=role)
    return builder.build(TraceMeta(host=HostCapture(growth, local_processes=4)))


def test_the_sum_and_its_bounds() -> None:
    unknown = Role.UNKNOWN
    trace = job(
        (HostEventKind.RESIDENT, -1, 100 * MIB, False, unknown),
        (ALLOC, 0, 40 * MIB, False, Role.PARAMETER),
        (ALLOC, 1, 10 * MIB, False, unknown),  # from the heap: the high bound keeps it
        (FREE, 1, 10 * MIB, False, unknown),
        (HostEventKind.WORKERS, -1, 30 * MIB, False, unknown),
        (ALLOC, 2, 33 * MIB, True, Role.OPTIMIZER_STATE),
        (FREE, 2, 33 * MIB, True, Role.OPTIMIZER_STATE),
        growth=107 * MIB,
    )
    answer = host_memory(trace, AllocatorSettings())
    assert answer is not None
    low, expected, high = PROCESS_BYTES
    held = (100 + 40 + 30 + 64) * MIB
    assert (answer.low, answer.peak) == (low + held, expected + held)
    assert answer.high == high + held + 10 * MIB + 7 * MIB
    assert answer.pinned == 64 * MIB
    parts = answer.breakdown
    assert parts.parameters == 40 * MIB
    assert parts.data == 100 * MIB
    assert parts.workers == 30 * MIB
    assert parts.optimizer_state + parts.pinned_unused == 64 * MIB
    assert sum(getattr(parts, name) for name in parts.__struct_fields__) == answer.peak


def test_the_estimate_speaks_of_the_process_and_of_the_node() -> None:
    whole = estimate(job((ALLOC, 0, 40 * MIB, False, Role.UNKNOWN)))
    assert whole.host_peak_bytes == PROCESS_BYTES[1] + 40 * MIB
    assert whole.host_processes == 4
    assert whole.host_node_peak_bytes == 4 * whole.host_peak_bytes
    assert whole.host_pinned_peak_bytes == 0


def test_a_trace_that_did_not_follow_the_host_has_no_answer() -> None:
    whole = estimate(TraceBuilder().build(TraceMeta()))
    assert whole.host_peak_bytes is None
    assert whole.host_breakdown is None
