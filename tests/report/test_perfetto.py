"""The trace for Perfetto: slices that nest, counters that follow the replay, and its own reader."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memplan.report.perfetto import export_perfetto
from memplan.report.replayed import replayed
from memplan.timing.step import priced_step
from memplan.types.device import captured_for
from memplan.types.trace import Phase, Trace
from tests.estimation.jobs import Job, training_job
from tests.estimation.test_difference import layers
from tests.timing.test_step import trained

HOSTILE = 'a"b\\c\n</script>\x1b[31m\u2028'


def exported(trace: Trace, path: Path) -> list[dict[str, Any]]:
    export_perfetto(trace, path)
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    entries: list[dict[str, Any]] = document["traceEvents"]
    return entries


def slices(entries: list[dict[str, Any]], track: str) -> list[dict[str, Any]]:
    number = next(
        entry["tid"]
        for entry in entries
        if entry["name"] == "thread_name" and entry["args"]["name"] == track
    )
    return [entry for entry in entries if entry["ph"] == "X" and entry["tid"] == number]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_counters_follow_the_replay(tmp_path: Path, name: str) -> None:
    entries = exported(training_job(), tmp_path / name)
    trace, timeline = replayed(training_job())
    for counter, column in (("allocated", timeline.allocated), ("reserved", timeline.reserved)):
        at = {e["ts"]: e["args"]["bytes"] for e in entries if e["name"] == counter}
        held, seen = 0, []
        for event in range(len(trace)):
            held = at.get(event, held)
            seen.append(held)
        assert seen == column.tolist()


def test_slices_of_steps_phases_and_operators(tmp_path: Path) -> None:
    entries = exported(training_job(), tmp_path / "t.json")
    trace, _ = replayed(training_job())
    steps, phases = slices(entries, "steps"), slices(entries, "phases")
    for track, column in ((steps, trace.events.step), (phases, trace.events.phase)):
        assert sum(entry["dur"] for entry in track) == len(trace)
        for entry in track:
            assert len(set(column[entry["ts"] : entry["ts"] + entry["dur"]].tolist())) == 1
    assert {entry["name"] for entry in steps} == {"step 0", "step 1"}
    named = [entry for entry in slices(entries, "operators") if entry["name"] == "mm_backward"]
    assert len(named) == 2
    assert named[0]["args"]["module"] == "model.fc1"
    assert named[0]["args"]["source"] == "train.py:12"
    assert named[0]["args"]["asked_bytes"] == 2 * 64 << 20


def test_modules_lie_within_those_that_hold_them(tmp_path: Path) -> None:
    entries = slices(exported(layers(), tmp_path / "t.json"), "modules")
    names = {entry["name"] for entry in entries}
    assert {"Model", "Model.blocks", "Model.blocks.0", "Model.blocks.0.mlp"} <= names
    for entry in entries:
        parent = entry["name"].rpartition(".")[0]
        end = entry["ts"] + entry["dur"]
        assert not parent or any(
            other["name"] == parent
            and other["ts"] <= entry["ts"]
            and end <= other["ts"] + other["dur"]
            for other in entries
        )


def test_a_step_in_real_time_by_stream(tmp_path: Path) -> None:
    trace = trained(collective=True)
    priced = priced_step(trace, captured_for(trace.meta.gpu))
    assert priced is not None
    step = [e for e in exported(trace, tmp_path / "t.json") if e["pid"] == 2 and e["ph"] == "X"]
    assert [(entry["tid"], entry["name"]) for entry in step] == [
        (0, "mm"),
        (0, "mm"),
        (7, "all-reduce of 512 MiB among 8 ranks in 1 node"),
    ]
    assert [entry["dur"] for entry in step] == pytest.approx(priced.device * 1e6, abs=1e-3)
    for earlier, later in pairwise(step):
        assert later["ts"] == pytest.approx(earlier["ts"] + earlier["dur"], abs=2e-3)
    ends = (step[-1]["ts"] + step[-1]["dur"]) * 1e-6
    assert ends == pytest.approx(priced.run.seconds, rel=1e-6)


def test_hostile_names(tmp_path: Path) -> None:
    job = Job()
    job.at(Phase.FORWARD, HOSTILE, HOSTILE, HOSTILE)
    job.alloc(512)
    entries = exported(job.build(), tmp_path / "t.json")
    assert slices(entries, "operators")[0]["args"]["source"] == HOSTILE


def test_perfettos_own_reader(tmp_path: Path) -> None:
    """Its wheel on PyPI fetches the reader from elsewhere when it is first used."""
    shell = os.environ.get("MEMPLAN_TRACE_PROCESSOR")
    if not shell:
        pytest.skip("name Perfetto's trace_processor_shell in MEMPLAN_TRACE_PROCESSOR")
    export_perfetto(training_job(), tmp_path / "t.json")
    query = "select max(value) from counter c join track t on c.track_id = t.id"
    command = [shell, "-Q", f"{query} where t.name glob 'reserved*'", str(tmp_path / "t.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert str(replayed(training_job())[1].reserved_peak_bytes) in done.stdout.replace(".0", "")
