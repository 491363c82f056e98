"""The table of events: what `memplan simulate` reads back, and where the job stood."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.capturing.importers.load_any import load_any
from memplan.report.event_table import COLUMNS, export_csv
from memplan.report.replayed import replayed
from memplan.simulate import AllocatorSettings, replay_report
from memplan.types.errors import UsageError
from tests.estimation.jobs import MIB, training_job
from tests.report.test_memory_viz import CONFS, random_trace, several


@several
@given(
    seed=st.integers(0, 10**6),
    conf=st.sampled_from(CONFS),
    device=st.integers(0, 1),
    streams=st.integers(1, 3),
)
def test_reading_the_table_back_gives_the_same_memory(
    tmp_path: Path, seed: int, conf: str, device: int, streams: int
) -> None:
    trace = random_trace(seed, device, streams, conf)
    path = tmp_path / "t.csv"
    export_csv(trace, path, device=device, overwrite=True)
    _, timeline = replayed(trace, device=device)
    back = replay_report(load_any(path), AllocatorSettings.parse(conf))
    assert back["reserved_peak_bytes"] == timeline.reserved_peak_bytes
    assert back["allocated_peak_bytes"] == timeline.allocated_peak_bytes
    assert back["segments_matched"] == back["segments_logged"]


def test_the_log_of_a_real_job(memplan_test_data: Path, tmp_path: Path) -> None:
    log = memplan_test_data / "allocator" / "conv_8768MiB.csv"
    export_csv(load_any(log), tmp_path / "t.csv")
    before, after = replay_report(load_any(log)), replay_report(load_any(tmp_path / "t.csv"))
    assert after["reserved_peak_bytes"] == before["reserved_peak_bytes"]
    assert after["allocated_peak_bytes"] == before["allocated_peak_bytes"]


def test_the_columns(tmp_path: Path) -> None:
    export_csv(training_job(), tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    first = next(row for row in rows if row["action"] == "alloc")
    assert {key: first[key] for key in COLUMNS[4:]} == {
        "event": "0",
        "step": "0",
        "phase": "setup",
        "module": "model",
        "op": "aten::empty",
        "source": "train.py:3",
        "tensor": "w0",
        "shape": "4096x4096",
        "dtype": "float32",
    }
    assert int(first["bytes"]) == 64 * MIB


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing of device 3"):
        export_csv(training_job(), tmp_path / "t.csv", device=3)
    assert not (tmp_path / "t.csv").exists()
