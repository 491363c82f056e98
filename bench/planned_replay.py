"""Real jobs' requests through the real allocator library: what it reserves, beside PyTorch's.

    python -m bench.planned_replay [NAME …]

The device is the stand-in driver's: host memory that nothing touches. Jobs are captures of the
examples and, where the data folder is there, two logs of real GPU runs. A log is of one stretch of
a run that does not recur in it; it is replayed as a step that recurs, with what was alive before it
made at its beginning and what it leaves released at its end. Writes
`bench/results/planned_replay.json`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bench.planned_speed import STANDIN, build_library
from bench.results import ROOT, write_result
from memplan.capturing.importers.event_csv import read_event_csv
from memplan.layout.static_plan import static_plan
from memplan.phases.steps import find_steps
from memplan.runtime.planned.library import DRIVER_VARIABLE, Library
from memplan.simulate import AllocatorSettings, simulate
from memplan.types.builder import TraceBuilder
from memplan.types.plan import AllocationPart
from memplan.types.trace import I64, EventKind, Phase, Trace, TraceMeta
from memplan.types.trace_file import load_trace

LOGS = ("conv_8768MiB", "transformer_45154MiB")
PASSES = 4
"""How often a log is repeated; the last pass is not complete, for a step ends with the next."""
TRACES = ROOT / "build" / "example-traces"
EXAMPLES = ("gpt2", "resnet50", "lora", "llama3_8b", "moe")
OPTIONS = ("--gpu", "h200", "--steps", "4", "--json", "-f", "-o")


@dataclass(frozen=True)
class Replayed:
    """What one replay came to, in bytes and requests."""

    reserved_peak: int
    arena_peak: int
    allocated_peak: int
    requests: int
    hits: int
    dynamic: int
    adopted: int
    misses: int
    resyncs: int

    @property
    def efficiency(self) -> float:
        """The most allocated over the most reserved."""
        return self.allocated_peak / self.reserved_peak


def replay(library: Library, trace: Trace, part: AllocationPart | None, device: int) -> Replayed:
    """Run the requests of a trace's only device through a library in its first state, on one of its
    devices, with a plan from the beginning or without one. Raises MemoryError where memory is out.
    """
    if part is not None:
        library.load(device, part)
    calls, nbytes = request_calls(trace)
    entered = phase_entries(trace, part.phases if part is not None else [])
    held: dict[int, int] = {}
    for event, storage in calls.tolist():
        if event in entered:
            library.enter_phase(device, entered[event])
        if storage < 0:
            if ~storage in held:
                library.free(held.pop(~storage), int(nbytes[~storage]), device)
            continue
        held[storage] = library.malloc(int(nbytes[storage]), device)
        if not held[storage]:
            raise MemoryError(f"no room for storage {storage}")
    for storage, address in held.items():
        library.free(address, int(nbytes[storage]), device)
    found = library.statistics(device)
    assert found is not None
    return Replayed(
        requests=found.mallocs,
        **{
            field.name: getattr(found, field.name)
            for field in fields(Replayed)
            if field.name != "requests"
        },
    )


def request_calls(trace: Trace) -> tuple[I64, I64]:
    """Rows of (event, storage made or ~storage released), and bytes by storage. A storage is
    released when its memory may be reused; those from before the trace are only released."""
    events = trace.events
    released = (events.kind == EventKind.FREE) | (events.kind == EventKind.FREE_COMPLETED)
    made = events.kind == EventKind.ALLOC
    nbytes = np.zeros(len(trace.storages), np.int64)
    for rows in (released, made):
        nbytes[events.storage[rows]] = events.bytes[rows]
    last = np.zeros(len(trace.storages), np.int64)
    last[events.storage[released]] = np.flatnonzero(released)
    rows = np.flatnonzero(made | released)
    storage = events.storage[rows]
    rows = rows[(nbytes[storage] > 0) & (made[rows] | (last[storage] == rows))]
    storage = events.storage[rows]
    return np.stack((rows, np.where(made[rows], storage, ~storage)), axis=1), nbytes


def phase_entries(trace: Trace, names: list[str]) -> dict[int, int]:
    """By the first request in it, or event before, the number of each phase that the job enters;
    -1 for evaluation."""
    spans = find_steps(trace).phases
    entries: dict[int, int] = {}
    rows = request_calls(trace)[0][:, 0]
    for row in range(len(spans)):
        phase = Phase(int(spans.phase[row]))
        name = f"{phase.name.lower()} {int(spans.micro_batch[row])}"
        at = int(np.searchsorted(rows, spans.start[row]))
        if at == len(rows) or phase in (Phase.SETUP, Phase.OTHER):
            continue
        if phase == Phase.EVALUATION or name in names:
            entries[int(rows[at])] = names.index(name) if name in names else -1
    return entries


def log_as_step(trace: Trace, passes: int = PASSES) -> Trace:
    """A log as a job whose every step is that log."""
    calls, nbytes = request_calls(trace)
    inside: list[int] = calls[:, 1].tolist()
    made = {storage for storage in inside if storage >= 0}
    before = [~storage for storage in inside if storage < 0 and ~storage not in made]
    builder = TraceBuilder()
    builder.phase = Phase.FORWARD
    for builder.step in range(passes):
        held: dict[int, int] = {}
        for storage in [*before, *inside]:
            if storage >= 0:
                held[storage] = builder.new_storage()
                builder.append(EventKind.ALLOC, held[storage], int(nbytes[storage]))
            else:
                builder.append(EventKind.FREE, held.pop(~storage), int(nbytes[~storage]))
        for storage, number in held.items():
            builder.append(EventKind.FREE, number, int(nbytes[storage]))
    return builder.build(TraceMeta(origin="csv", method="observed"))


def example_trace(name: str) -> Trace:
    """The captured trace of an example; captured now unless it was before. Raises
    CalledProcessError."""
    path = TRACES / f"{name}.trace"
    if not path.exists():
        TRACES.mkdir(parents=True, exist_ok=True)
        script = ROOT / "examples" / name / "train.py"
        command = [sys.executable, "-m", "memplan", "estimate", *OPTIONS, str(path), str(script)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode not in (0, 3):
            raise subprocess.CalledProcessError(done.returncode, command)
    return load_trace(path)


def measure(trace: Trace, library: Library, device: int, logged_bytes: int = 0) -> dict[str, Any]:
    """One row: our replay, and what PyTorch's allocator would reserve for the same requests (or
    for the log as it is, where that is less)."""
    native = simulate(trace, AllocatorSettings()).reserved_peak_bytes
    expandable = simulate(trace, AllocatorSettings(expandable_segments=True)).reserved_peak_bytes
    ours = replay(library, trace, static_plan(trace).part, device)
    return {
        "native_reserved_bytes": min(native, logged_bytes or native),
        "expandable_reserved_bytes": expandable,
        "reserved_of_native": ours.reserved_peak / min(native, logged_bytes or native),
        "efficiency": ours.efficiency,
        **asdict(ours),
    }


def rows(names: list[str]) -> Iterator[tuple[str, Trace, int]]:
    """Name, trace, and what the log shows or its simulation reserves; 0 for examples."""
    for name in EXAMPLES:
        if not names or name in names:
            yield name, example_trace(name), 0
    shared = Path(os.environ.get("MEMPLAN_SHARED_DATA") or ROOT.parent / "shared" / "data")
    for name in LOGS:
        path = shared / "allocator" / f"{name}.csv"
        if (not names or name in names) and path.is_file():
            trace = read_event_csv(path)
            yield name, log_as_step(trace), simulate(trace).reserved_peak_bytes


def main(names: list[str]) -> None:
    library, driver = build_library()
    os.environ.update({DRIVER_VARIABLE: str(driver), **STANDIN})
    loaded = Library(library)
    table: dict[str, dict[str, Any]] = {}
    for device, (name, trace, logged) in enumerate(rows(names)):
        row = table[name] = measure(trace, loaded, device, logged)
        print(
            f"{name:22s} native {row['native_reserved_bytes'] / 2**20:8.0f} MiB, expandable "
            f"{row['expandable_reserved_bytes'] / 2**20:8.0f}, planned "
            f"{row['reserved_peak'] / 2**20:8.0f}; efficiency {row['efficiency']:.1%}, "
            f"{row['misses']} of {row['requests']} missed",
            flush=True,
        )
    if not names:
        print(write_result("planned_replay", {"table": table, "summary": summary(table)}))


def summary(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals look at."""
    return {
        "logs": sum(name in LOGS for name in table),
        "worst_of_native": max(row["reserved_of_native"] for row in table.values()),
        "least_efficiency": min(row["efficiency"] for row in table.values()),
        "least_hit_rate": min(
            (row["hits"] + row["dynamic"]) / row["requests"] for row in table.values()
        ),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
