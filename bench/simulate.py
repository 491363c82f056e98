"""How fast the allocator replay is, and how exact on two real logs (`simulate.json`).

Speed is the whole call of `simulate`, which runs on one thread, by that thread's processor time:
what it would take on a machine that does nothing else. Streams have at least 300,000 events: a made
one, shaped like training steps whose sizes vary, and each real log repeated end to end. Of the
repeats of a stream the fastest counts, of the streams the slowest.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.results import ROOT, write_result
from memplan.capturing.importers.event_csv import read_event_csv
from memplan.simulate import AllocatorSettings, replay_report, simulate
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Storages, Trace, TraceMeta
from tests.oracles.allocator.replay import simulate_slowly

EVENTS = 300_000
REPEATS = 15
ORACLE_EVENTS = 2_000
LOGS = {"conv": "conv_8768MiB.csv", "transformer": "transformer_45154MiB.csv"}


def training_steps(events: int = EVENTS, seed: int = 0) -> Trace:
    """Parameters, then steps of 48 layers whose batch varies, so that the cache fragments."""
    rng = random.Random(seed)
    builder = TraceBuilder()

    def alloc(nbytes: int) -> int:
        storage = builder.new_storage()
        builder.append(EventKind.ALLOC, storage, nbytes)
        return storage

    for _ in range(600):
        alloc(rng.choice([4096, 3 << 20, 12 << 20, 300_000]))
    while len(builder) < events:
        batch = rng.randint(4, 16)
        kept: list[int] = []
        for backward in (False, True):
            for layer in range(48):
                temporaries: list[int] = []
                for part in range(12):
                    storage = alloc(batch * (part * part * 30_000 + 512 * layer + 100))
                    (kept if part % 3 == 0 and not backward else temporaries).append(storage)
                rng.shuffle(temporaries)
                if backward:
                    temporaries += [kept.pop() for _ in range(4)]
                for storage in temporaries:
                    builder.append(EventKind.FREE, storage)
    return builder.build(TraceMeta())


def repeated(trace: Trace, events: int = EVENTS) -> Trace:
    """The trace end to end until it has that many events; what it leaves is freed in between."""
    once = trace.events
    begun = once.storage[once.kind == EventKind.ALLOC]
    left = np.setdiff1d(begun, once.storage[once.kind == EventKind.FREE])
    size = len(trace) + len(left)
    columns = {}
    for field in dataclasses.fields(once):
        column = getattr(once, field.name)
        tail = np.zeros(len(left), dtype=column.dtype)
        if field.name == "kind":
            tail[:] = EventKind.FREE
        elif field.name == "storage":
            tail[:] = left
        elif field.name in ("op", "aux"):
            tail[:] = -1
        columns[field.name] = np.concatenate((column, tail))
    count = -(-events // size)
    tiled = {name: np.tile(column, count) for name, column in columns.items()}
    round_of = np.repeat(np.arange(count), size)
    tiled["storage"] = np.where(
        tiled["storage"] >= 0, tiled["storage"] + round_of * len(trace.storages), -1
    )
    storages = Storages(
        **{
            field.name: np.tile(getattr(trace.storages, field.name), count)
            for field in dataclasses.fields(trace.storages)
        }
    )
    return dataclasses.replace(trace, events=dataclasses.replace(once, **tiled), storages=storages)


def events_per_second(trace: Trace, settings: AllocatorSettings) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        simulate(trace, settings)
        times.append(time.thread_time() - start)
    return len(trace) / min(times)


def oracle_events_per_second(trace: Trace) -> float:
    """The plain model's speed, on the first events of a trace."""
    events = dataclasses.replace(
        trace.events,
        **{
            field.name: getattr(trace.events, field.name)[:ORACLE_EVENTS]
            for field in dataclasses.fields(trace.events)
        },
    )
    start = time.thread_time()
    simulate_slowly(dataclasses.replace(trace, events=events), AllocatorSettings())
    return ORACLE_EVENTS / (time.thread_time() - start)


def log_result(path: Path) -> dict[str, Any]:
    """The replay of a real log beside what it holds."""
    trace = read_event_csv(path)
    events = trace.events
    sign = (events.kind == EventKind.SEGMENT_ALLOC).astype(np.int64)
    sign -= events.kind == EventKind.SEGMENT_FREE
    peak = int(np.cumsum(sign * events.bytes).max(initial=0))
    return {**replay_report(trace), "reserved_peak_bytes_logged": peak}


def main() -> None:
    made = training_steps()
    default, expandable = AllocatorSettings(), AllocatorSettings(expandable_segments=True)
    speeds = {
        "training_steps": events_per_second(made, default),
        "training_steps_expandable": events_per_second(made, expandable),
    }
    data: dict[str, Any] = {}
    folder = Path(os.environ.get("MEMPLAN_SHARED_DATA") or ROOT.parent / "shared" / "data")
    for name, file in LOGS.items():
        path = folder / "allocator" / file
        if path.exists():
            speeds[f"{name}_repeated"] = events_per_second(repeated(read_event_csv(path)), default)
            data[name] = log_result(path)
    data["events"] = len(made)
    data["speeds"] = speeds
    data["events_per_second"] = min(speeds.values())
    data["oracle_events_per_second"] = oracle_events_per_second(made)
    for name, speed in speeds.items():
        print(f"{name}: {speed / 1e6:.1f} million events a second")
    print(write_result("simulate", data))


if __name__ == "__main__":
    main()
