"""What the process held before the log, and the replay of real logs from there."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from memplan.capturing.importers.event_csv import read_event_csv
from memplan.simulate import infer_start, replay_report, simulate
from memplan.simulate.replay import with_start
from memplan.simulate.settings import MIB
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Trace, TraceMeta

LOGS = {"conv_8768MiB.csv": 8768, "transformer_45154MiB.csv": 45154}
BASE = 1 << 40


def log(*rows: tuple[EventKind, int, int, int]) -> Trace:
    """Rows of (kind, storage, bytes, address)."""
    builder = TraceBuilder()
    for _ in range(1 + max(storage for _, storage, _, _ in rows)):
        builder.new_storage()
    for kind, storage, nbytes, address in rows:
        builder.append(kind, storage, nbytes, aux=address)
    return builder.build(TraceMeta(origin="csv"))


def blocks(trace: Trace) -> list[tuple[int, int, int]]:
    """(offset, bytes, storage) of the only segment."""
    (segment,) = infer_start(trace)
    assert segment.address == BASE
    return [(b.address - BASE, b.bytes, b.storage) for b in segment.blocks]


def test_what_is_handed_out_was_cached_and_so_was_the_end() -> None:
    trace = log((EventKind.ALLOC, 0, 1000, BASE + 4096))
    assert blocks(trace) == [
        (0, 4096, -2),
        (4096, 1024, -1),
        (5120, 2 * MIB - 5120, -1),
    ]


def test_what_is_released_first_was_in_use() -> None:
    trace = log(
        (EventKind.FREE, 0, 1000, BASE + 1024),
        (EventKind.FREE_COMPLETED, 0, 1000, BASE + 1024),
        (EventKind.ALLOC, 1, 4096, BASE),
    )
    assert blocks(trace)[:3] == [(0, 1024, -1), (1024, 1024, 0), (2048, 2048, -1)]
    assert with_start(trace).meta.initial_segments
    assert simulate(with_start(trace)).address.tolist() == [-1, -1, BASE]


def test_a_hole_that_the_large_pool_cannot_have_is_a_tail() -> None:
    trace = log(
        (EventKind.FREE, 0, 3 * MIB + 512 * 1024, BASE),
        (EventKind.ALLOC, 1, 2 * MIB, BASE + 4 * MIB),
        (EventKind.ALLOC, 2, 2 * MIB, BASE + 9 * MIB),
    )
    assert blocks(trace) == [
        (0, 4 * MIB, 0),
        (4 * MIB, 2 * MIB, -1),
        (6 * MIB, 3 * MIB, -2),
        (9 * MIB, 2 * MIB, -1),
        (11 * MIB, 9 * MIB, -1),
    ]


def test_a_segment_of_the_log_is_no_memory_from_before() -> None:
    trace = log(
        (EventKind.SEGMENT_ALLOC, -1, 2 * MIB, BASE),
        (EventKind.ALLOC, 0, 1000, BASE + 512),
    )
    assert infer_start(trace) == []


def test_later_segments_are_not_read() -> None:
    rows = [
        (EventKind.ALLOC, 0, 1000, BASE),
        (EventKind.SEGMENT_ALLOC, -1, 20 * MIB, BASE + 2 * MIB),
        (EventKind.ALLOC, 1, 3 * MIB, BASE + 2 * MIB),
    ]
    assert infer_start(log(*rows)) == infer_start(log(*rows[:1], rows[2]))[:1]


def test_segments_given_back_show_their_extent() -> None:
    trace = log(
        (EventKind.ALLOC, 0, 12 * MIB, BASE + 14 * MIB),
        (EventKind.SEGMENT_FREE, -1, 60 * MIB, BASE),
    )
    assert blocks(trace)[-1] == (26 * MIB, 34 * MIB, -1)


@pytest.fixture(params=list(LOGS))
def real_log(request: pytest.FixtureRequest, memplan_test_data: Path) -> tuple[Path, int]:
    path = memplan_test_data / "allocator" / request.param
    if not path.exists():
        pytest.skip(f"no {path}")
    return path, LOGS[request.param] * MIB


def test_a_real_log_is_predicted_exactly(real_log: tuple[Path, int]) -> None:
    path, peak = real_log
    trace = read_event_csv(path)
    report = replay_report(trace)
    assert report["reserved_peak_bytes"] == peak
    assert report["segments_logged"] == report["segments_predicted"] == report["segments_matched"]
    assert report["start_inferred"]
    assert report["start_reserved_bytes"] == 2 * MIB
    timeline = simulate(with_start(trace))
    requests = trace.events.kind == EventKind.ALLOC
    np.testing.assert_array_equal(timeline.address[requests], trace.events.aux[requests])


def test_logged_segments_decide_nothing(real_log: tuple[Path, int]) -> None:
    trace = with_start(read_event_csv(real_log[0]))
    told = trace.events.kind != EventKind.SEGMENT_ALLOC
    columns = {
        field.name: getattr(trace.events, field.name)[told]
        for field in dataclasses.fields(trace.events)
    }
    events = dataclasses.replace(trace.events, **columns)
    untold = simulate(dataclasses.replace(trace, events=events))
    timeline = simulate(trace)
    np.testing.assert_array_equal(untold.segment_events.bytes, timeline.segment_events.bytes)
    np.testing.assert_array_equal(untold.reserved, timeline.reserved[told])


def test_a_log_that_begins_anywhere_is_predicted(
    real_log: tuple[Path, int], tmp_path: Path
) -> None:
    header, *rows = real_log[0].read_text().splitlines()
    cuts = random.Random(5)
    for _ in range(4):
        at = cuts.randrange(len(rows) * 3 // 4)
        path = tmp_path / "cut.csv"
        path.write_text("\n".join([header, *rows[at:]]))
        report = replay_report(read_event_csv(path))
        assert report["segments_matched"] == report["segments_logged"] > 0, at
