"""Efficiency of the planned allocator where the job differs from its plan (`perturbed.json`).

    python -m bench.run.perturbed [ROW…]

The rows of the layout table are planned from their captures and then run with 0, 1, 5 and 20 % of
their requests changed at random, with an evaluation before the last step, and with a smaller last
batch (`perturbation.py`). The requests go through the real library over the stand-in CUDA driver;
reserved bytes are what it took from that device at the most. PyTorch's own allocator is replayed on
the same requests. With rows named, nothing is written.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.layout.efficiency import EXPANDABLE, allocated_peak, online
from bench.layout.rows import ROWS, Row, row_trace
from bench.planned_speed import build_library
from bench.results import write_result
from bench.run.perturbation import perturbed, with_evaluation, with_last_batch
from memplan.layout.serve import phase_entries
from memplan.layout.static_plan import static_plan
from memplan.layout.streams import lifetimes
from memplan.runtime.planned.library import DRIVER_VARIABLE, Library
from memplan.simulate import AllocatorSettings
from memplan.types.plan import AllocationPart
from memplan.types.trace import EventKind, Trace

SHARES = (0.0, 0.01, 0.05, 0.2)
SEEDS = (0, 1)
LAST_BATCH = 0.625
DEVICE_BYTES = 192 << 30


@dataclass(frozen=True)
class Outcome:
    """One run of one job."""

    efficiency: float
    native: float
    """Efficiency of PyTorch's allocator on the same requests,"""
    expandable: float
    """and with expandable segments."""
    hit_rate: float
    """Requests in the arena at their planned place or in their space, of all."""
    adopted: int
    missed: int
    resyncs: int
    reserved_bytes: int


class Replayer:
    """Runs a trace through the library, with its streams."""

    def __init__(self, path: Path, driver: Path) -> None:
        """The library, and the stand-in driver that it loads."""
        os.environ |= {
            DRIVER_VARIABLE: str(driver),
            "STANDIN_CUDA_BYTES": str(DEVICE_BYTES),
        }
        self._library = Library(path)

    def run(self, trace: Trace, part: AllocationPart) -> Outcome:
        """One job from its beginning to its end, nothing mapped before."""
        library, device, events = self._library, 0, trace.events
        library.load(device, part)
        mine = (events.device == part.device) & (events.bytes > 0)
        asked = np.flatnonzero((events.kind == EventKind.ALLOC) & mine)
        end = lifetimes(trace, part.device).end
        starts, phases = phase_entries(trace, part.phases)
        entered = dict(zip(starts.tolist(), phases.tolist(), strict=True))
        due: dict[int, list[int]] = {}
        for storage in events.storage[asked].tolist():
            due.setdefault(int(end[storage]), []).append(storage)
        made = dict(zip(asked.tolist(), events.storage[asked].tolist(), strict=True))
        held: dict[int, tuple[int, int]] = {}
        for row in sorted({*due, *made, *entered}):
            if row >= len(trace):
                break
            for storage in due.get(row, ()):
                library.free(*held.pop(storage), device)
            if row in entered:
                library.enter_phase(device, entered[row])
            if row in made:
                nbytes = int(events.bytes[row])
                # To the stand-in any number is a stream; 0 is the default one.
                address = library.malloc(nbytes, device, int(events.stream[row]))
                if not address:
                    raise MemoryError(f"no room for storage {made[row]}")
                held[made[row]] = address, nbytes
        found = library.statistics(device)
        assert found is not None
        return Outcome(
            efficiency=allocated_peak(trace) / found.reserved_peak,
            native=online(trace, AllocatorSettings()).efficiency,
            expandable=online(trace, EXPANDABLE).efficiency,
            hit_rate=(found.hits + found.dynamic) / len(asked),
            adopted=found.adopted,
            missed=found.misses,
            resyncs=found.resyncs,
            reserved_bytes=found.reserved_peak,
        )


def cases(trace: Trace) -> dict[str, Trace]:
    """What is run, by name."""
    changed = {
        f"{share * 100:.0f} % seed {seed}": perturbed(trace, share, seed) if share else trace
        for share in SHARES
        for seed in (SEEDS if share else SEEDS[:1])
    }
    return {
        **changed,
        "evaluation": with_evaluation(trace),
        "last batch": with_last_batch(trace, LAST_BATCH),
    }


def measure(row: Row) -> dict[str, dict[str, Any]]:
    """The cases of one row."""
    trace = row_trace(row)
    part = static_plan(trace).part
    # A process each: the library has one state, which a job leaves behind.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = {name: pool.apply(_run, (job, part)) for name, job in cases(trace).items()}
    return {name: asdict(outcome) for name, outcome in found.items()}


def _run(job: Trace, part: AllocationPart) -> Outcome:
    return Replayer(*build_library()).run(job, part)


def summary(table: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the goals look at."""
    routed = {row.name for row in ROWS if row.routed}
    found: dict[str, Any] = {"rows": len(table)}
    for part, inside in (("static", False), ("routed", True)):
        rows = [cases for name, cases in table.items() if (name in routed) == inside]
        for case in next(iter(table.values())):
            name = f"{part} {case.split(' seed')[0]}"
            values = [row[case]["efficiency"] for row in rows]
            found[name] = min(found.get(name, 1.0), *values)
    every = [case for cases in table.values() for case in cases.values()]
    found["least_lead_over_native"] = min(case["efficiency"] - case["native"] for case in every)
    found["least_lead_over_expandable"] = min(
        case["efficiency"] - case["expandable"] for case in every
    )
    return found


def main(names: list[str]) -> None:
    build_library()
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for row in ROWS:
        if names and row.name not in names:
            continue
        table[row.name] = measure(row)
        for case, found in table[row.name].items():
            print(
                f"{row.name:26s}{case:14s} memplan {found['efficiency']:6.1%}, native "
                f"{found['native']:6.1%}, expandable {found['expandable']:6.1%}; hits "
                f"{found['hit_rate']:6.1%}, missed {found['missed']}",
                flush=True,
            )
    if not names:
        print(write_result("perturbed", {"table": table, "summary": summary(table)}))


if __name__ == "__main__":
    main(sys.argv[1:])
