"""Real jobs' requests through the library: what it reserves beside PyTorch's allocator."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.planned_replay import log_as_step, replay, request_calls
from memplan.capturing.importers.event_csv import read_event_csv
from memplan.layout.static_plan import static_plan
from memplan.runtime.planned.library import DRIVER_VARIABLE, Library
from memplan.simulate import simulate
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Trace, TraceMeta

LOGS = {"conv_8768MiB": 8768, "transformer_45154MiB": 45154}
MIB = 1 << 20


@pytest.fixture
def library(
    planned_library: Path, standin_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Library:
    """A copy, and so a state of its own."""
    driver = shutil.copy(standin_driver, tmp_path / "driver.so")
    monkeypatch.setenv(DRIVER_VARIABLE, str(driver))
    return Library(shutil.copy(planned_library, tmp_path / "library.so"))


@pytest.mark.parametrize("name", LOGS)
def test_a_real_log_takes_less_than_its_own_allocator_took(
    library: Library, memplan_test_data: Path, name: str
) -> None:
    log = read_event_csv(memplan_test_data / "allocator" / f"{name}.csv")
    job = log_as_step(log)
    native = simulate(log).reserved_peak_bytes
    assert native == LOGS[name] * MIB
    found = replay(library, job, static_plan(job, seconds=1.0).part, device=0)
    assert found.reserved_peak < 0.9 * native
    assert found.hits >= 0.99 * found.requests


def log_with_a_past() -> Trace:
    """Something from before is released, something stays."""
    builder = TraceBuilder()
    first, second, third = (builder.new_storage() for _ in range(3))
    builder.append(EventKind.ALLOC, first, 3 * MIB)
    builder.append(EventKind.FREE, second, 5 * MIB)
    builder.append(EventKind.ALLOC, third, 7 * MIB)
    builder.append(EventKind.FREE, first, 3 * MIB)
    builder.append(EventKind.FREE_COMPLETED, first, 3 * MIB)
    return builder.build(TraceMeta(origin="csv", method="observed"))


def test_a_log_becomes_a_step_that_leaves_nothing_behind() -> None:
    job = log_as_step(log_with_a_past(), passes=2)
    calls, nbytes = request_calls(job)
    storages = calls[:, 1].tolist()
    assert len(storages) == 12
    assert sorted(s for s in storages if s >= 0) == sorted(~s for s in storages if s < 0)
    assert nbytes[storages[:2]].tolist() == [5 * MIB, 3 * MIB]
    assert job.events.step.tolist() == [0] * 6 + [1] * 6
