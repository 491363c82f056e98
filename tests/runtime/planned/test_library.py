"""The binding against the real library, over the stand-in driver."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memplan.layout.static_plan import static_plan
from memplan.runtime.planned.library import DRIVER_VARIABLE, Library
from memplan.runtime.planned.recording import Recording, observed_meta
from memplan.types.allocation import Requests, pack_requests, read_requests
from memplan.types.errors import InternalError, UsageError
from memplan.types.plan import AllocationPart
from memplan.types.trace import EventKind, Phase, Trace

MIB = 1 << 20


@pytest.fixture
def library(
    planned_library: Path, standin_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Library]:
    """A copy, and so a state of its own."""
    copies = [
        shutil.copy(path, tmp_path / f"{number}-{path.name}")
        for number, path in enumerate((planned_library, standin_driver))
    ]
    monkeypatch.setenv(DRIVER_VARIABLE, str(copies[1]))
    yield Library(copies[0])


def _step(library: Library, recording: Recording | None = None) -> None:
    def mark(phase: Phase) -> None:
        if recording is not None:
            recording.mark(phase, "")

    mark(Phase.FORWARD)
    kept = [library.malloc(size * MIB) for size in (3, 5, 8)]
    mark(Phase.BACKWARD)
    for pointer in reversed(kept):
        library.free(library.malloc(4 * MIB))
        library.free(pointer)
    mark(Phase.OPTIMIZER)
    library.free(library.malloc(6 * MIB))
    if recording is not None:
        recording.stepped()
        recording.mark(Phase.FORWARD, "")


def _recorded(library: Library, steps: int = 4) -> Trace:
    recording = Recording(library, [0])
    parameters = library.malloc(10 * MIB)
    for _ in range(steps):
        _step(library, recording)
    recording.stop()
    library.free(parameters)
    return recording.trace(observed_meta([], "", "", ""))


def test_requests_are_counted(library: Library) -> None:
    assert library.statistics(0) is None
    pointer = library.malloc(1000)
    seen = library.statistics(0)
    assert seen is not None
    assert (seen.requested, seen.allocated, seen.mallocs) == (1000, 1024, 1)
    assert seen.reserved >= 1024
    library.free(pointer)
    library.empty_cache(0)
    seen = library.statistics(0)
    assert seen is not None and (seen.allocated, seen.reserved, seen.frees) == (0, 0, 1)
    assert seen.allocated_peak == 1024
    library.reset_peaks(0)
    seen = library.statistics(0)
    assert seen is not None and seen.allocated_peak == 0


def test_no_bytes_have_no_address(library: Library) -> None:
    assert library.malloc(0) == 0


def test_a_snapshot_holds_what_is_in_use(library: Library) -> None:
    pointer = library.malloc(3 * MIB)
    blocks = library.snapshot(0)
    used = blocks[blocks["requested"] > 0]
    assert used["address"].tolist() == [pointer] and used["requested"].tolist() == [3 * MIB]
    assert used["state"].tolist() == [1]


def test_what_is_recorded_is_what_was_asked(library: Library) -> None:
    before = library.malloc(7 * MIB)
    trace = _recorded(library)
    library.free(before)
    asked = trace.events.bytes[trace.events.kind == EventKind.ALLOC] // MIB
    assert asked.tolist() == [7, 10, *[3, 5, 8, 4, 4, 4, 6] * 4]
    freed = trace.events.storage[trace.events.kind == EventKind.FREE]
    assert len(np.unique(freed)) == len(freed) == 28  # of each step; the rest is in use
    assert trace.meta.optimizer_steps == 4
    backward = trace.events.phase == Phase.BACKWARD
    assert (trace.events.bytes[backward & (trace.events.kind == EventKind.ALLOC)] == 4 * MIB).all()


def test_marks_name_the_streams_that_have_requests(library: Library) -> None:
    recording = Recording(library, [0])
    pointers = [library.malloc(MIB, 0, stream) for stream in (0, 77)]
    for stream in (77, 99, 0):
        recording.order(EventKind.EVENT_RECORD, 0, stream, stream)
    recording.stop()
    for pointer in pointers:
        library.free(pointer)
    trace = recording.trace(observed_meta([], "", "", ""))
    told = trace.events.kind == EventKind.EVENT_RECORD
    assert trace.events.stream[told].tolist() == [1, 0]
    assert trace.events.aux[told].tolist() == [77, 0]


@pytest.mark.parametrize("setup", [True, False])
def test_a_plan_of_what_was_recorded_serves_it(library: Library, setup: bool) -> None:
    part = static_plan(_recorded(library), setup=setup).part
    library.load(0, part, in_round=not setup)
    parameters = library.malloc(10 * MIB) if setup else 0
    for _ in range(4):
        for number, phase in enumerate(part.phases):
            if phase == "forward 0":
                library.enter_phase(0, number)
        _step(library)
    seen = library.statistics(0)
    assert seen is not None
    assert seen.hits == 28 + setup and seen.misses == 0
    if setup:
        library.free(parameters)
    library.unload(0)
    library.free(library.malloc(3 * MIB))
    after = library.statistics(0)
    assert after is not None and after.hits == seen.hits


def test_a_plan_that_cannot_be_is_refused_with_the_reason(library: Library) -> None:
    part = static_plan(_recorded(library)).part
    requests = read_requests(part)
    beyond = replace(requests, offset=np.full(len(requests), part.arena_bytes))
    broken = msgspec.structs.replace(part, columns=pack_requests(beyond))
    with pytest.raises(UsageError, match="the plan is refused: "):
        library.load(0, broken)
    pointer = library.malloc(MIB)
    assert pointer
    library.free(pointer)


def test_a_plan_without_requests_is_refused(library: Library) -> None:
    none = Requests(*[np.zeros(0, np.int64)] * 7)
    columns = pack_requests(none)
    empty = AllocationPart(
        requests=0, setup=0, start=0, clock=1, arena_bytes=0, load_bytes=0, columns=columns
    )
    with pytest.raises(UsageError, match="refused"):
        library.load(0, empty)


def test_what_is_free_now_serves_before_more_memory_is_taken(library: Library) -> None:
    """The plan has no room for a request whose place is taken; for a while its bytes are free."""
    columns = ([20 * MIB] * 2, [0, 0], [0, 0], [0, 1], [3, 2], [0, 20 * MIB], [-1, -1])
    part = AllocationPart(
        requests=2,
        setup=0,
        start=0,
        clock=4,
        arena_bytes=40 * MIB,
        load_bytes=40 * MIB,
        phases=["forward 0"],
        columns=pack_requests(Requests(*[np.array(column, np.int64) for column in columns])),
    )
    library.load(0, part, in_round=True)
    first = library.malloc(20 * MIB)
    library.free(library.malloc(20 * MIB))
    again = library.malloc(20 * MIB)
    assert again - first == 20 * MIB
    library.free(again)
    library.free(library.malloc(20 * MIB))
    seen = library.statistics(0)
    assert seen is not None and (seen.hits, seen.adopted, seen.misses) == (3, 1, 0)
    assert seen.reserved_peak == seen.arena_mapped == 40 * MIB


def test_pages_that_the_plan_needs_last_are_given_back_first(library: Library) -> None:
    """Three places of 20 MiB, the highest needed first, and two that stay in use between them."""
    held, places = (
        ((2, -1, 0, 8, 20), (2, -1, 1, 8, 42)),
        (
            (20, 0, 2, 3, 44),
            (20, 0, 4, 5, 22),
            (20, 0, 6, 7, 0),
        ),
    )
    size, phase, lower, upper, offset = np.array([*held, *places], np.int64).T
    columns = Requests(size * MIB, 0 * size, phase, lower, upper, offset * MIB, 0 * size - 1)
    part = AllocationPart(
        requests=5,
        setup=2,
        start=2,
        clock=6,
        arena_bytes=64 * MIB,
        load_bytes=64 * MIB,
        phases=["forward 0"],
        columns=pack_requests(columns),
    )
    library.load(0, part)
    stays = [library.malloc(2 * MIB) for _ in range(2)]
    top = stays[0] + 44 * MIB
    for _ in range(5):
        library.free(library.malloc(20 * MIB))
    stays.append(library.malloc(22 * MIB))  # the last place in another size: it fits nowhere
    seen = library.statistics(0)
    assert seen is not None and (seen.hits, seen.misses) == (7, 1)
    blocks = library.snapshot(0)
    ends = (blocks["address"] + blocks["bytes"])[blocks["planned"] == 1]
    assert ends.max() == top and seen.arena_mapped < 64 * MIB
    for pointer in stays:
        library.free(pointer)


def test_a_limit_holds(library: Library) -> None:
    library.set_limit(0, 64 * MIB)
    assert library.malloc(100 * MIB) == 0
    pointer = library.malloc(20 * MIB)
    assert pointer
    seen = library.statistics(0)
    assert seen is not None and seen.ooms == 1 and seen.reserved <= 64 * MIB


def test_the_functions_that_pytorch_calls_are_there(library: Library) -> None:
    names = ("memplan_torch_malloc", "memplan_free", "memplan_record_stream")
    assert all(library.address_of(name) for name in (*names, "memplan_torch_empty_cache"))


def test_a_library_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "libmemplan_planned.so").write_bytes(b"\x7fELF")
    with pytest.raises(InternalError, match="cannot be used"):
        Library(tmp_path / "libmemplan_planned.so")


def test_a_forked_child_has_no_device_and_releases_nothing(library: Library) -> None:
    pointer = library.malloc(3 * MIB)
    child = os.fork()
    if child == 0:  # what is not true ends it with 1
        library.free(pointer)
        library.enter_phase(0, 0)
        os._exit(0 if library.statistics(0) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = library.statistics(0)
    assert before is not None and before.allocated == 3 * MIB
    library.free(pointer)
    after = library.statistics(0)
    assert after is not None and after.allocated == 0
