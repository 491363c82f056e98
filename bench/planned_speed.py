"""Time of a request with its release: planned, and through a plain best-fit caching allocator.

    python -m bench.planned_speed [TRACE]

Both run in one process (`native/planned/speed.cpp`) over the stand-in CUDA driver, which is host
memory: the rounds of GPT-2's plan in one thread, requests of one size in four. Writes
`bench/results/planned_speed.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.layout.rows import ROWS, row_trace
from bench.results import ROOT, write_result
from memplan.layout.static_plan import StaticPlan, static_plan
from memplan.types.allocation import Requests
from memplan.types.plan import AllocationPart
from memplan.types.trace import I64
from memplan.types.trace_file import load_trace

ROUNDS = 100
STANDIN = {"STANDIN_CUDA_DEVICES": "8"}
"""Environment of the stand-in driver."""
BUILD = ROOT / "build" / "planned-speed"
COLUMNS = ("bytes", "stream", "phase", "lower", "upper", "offset")


def build(folder: Path = BUILD, program: str = "memplan_planned_speed") -> Path:
    """The folder with the library, the stand-in driver and a program. Raises
    CalledProcessError."""
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(folder), "-DMEMPLAN_STRESS=ON"]
    targets = [program, "memplan_standin_cuda"]
    make = ["cmake", "--build", str(folder), "--parallel", "2", "--target", *targets]
    for command in ([*configure, "-DCMAKE_BUILD_TYPE=Release"], make):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def build_library() -> tuple[Path, Path]:
    """The allocator's library and the stand-in driver."""
    folder = build()
    return folder / "libmemplan_planned.so", folder / "libmemplan_standin_cuda.so"


def calls(part: AllocationPart, requests: Requests) -> tuple[I64, I64]:
    """What the setup and what every round calls, in order: a request is its row, a release the
    bitwise complement of it. What a round holds on to is released in the next one."""
    rows = np.arange(len(requests))
    made = np.maximum.accumulate(requests.lower)
    before = rows < part.setup
    stays = before & (requests.upper >= part.start + part.clock)
    over = np.minimum(requests.upper, part.start)[before & ~stays]
    end = part.start + part.clock
    recurs = np.where(requests.upper > end, requests.upper - part.clock, requests.upper)[~before]
    return (
        _in_order(rows[before], made[before], rows[before & ~stays], over),
        _in_order(rows[~before], made[~before], rows[~before], recurs),
    )


def _in_order(asked: I64, asked_at: I64, released: I64, released_at: I64) -> I64:
    """Releases come first among calls of one moment."""
    at = np.concatenate((released_at, asked_at))
    return np.concatenate((~released, asked))[np.argsort(at, kind="stable")]


def job_file(found: StaticPlan, path: Path) -> None:
    """A plan and its calls, as `speed.cpp` reads them."""
    part, requests = found.part, found.requests
    head = (
        part.requests,
        part.setup,
        part.start,
        part.clock,
        part.arena_bytes,
        len(part.phases),
    )
    setup, round_ = calls(part, requests)
    columns = [getattr(requests, name) for name in COLUMNS]
    counts = (len(setup), len(round_))
    numbers = np.concatenate((head, *columns, counts, setup, round_))
    path.write_bytes(numbers.astype("<i8").tobytes())


def measure(found: StaticPlan, rounds: int = ROUNDS) -> dict[str, Any]:
    """Nanoseconds of a pair, by allocator and by number of threads."""
    folder = build()
    program, driver = folder / "memplan_planned_speed", folder / "libmemplan_standin_cuda.so"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "job"
        job_file(found, path)
        command = [str(program), str(driver), str(path), str(rounds)]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **STANDIN}
        )
    table: dict[str, Any] = json.loads(done.stdout)
    for row in table.values():
        row["times_faster"] = row["plain_ns"] / row["planned_ns"]
        row["hit_rate"] = row["hits"] / row["requests"]
    return table


def main(arguments: list[str]) -> None:
    trace = load_trace(arguments[0]) if arguments else row_trace(ROWS[0])
    table = measure(static_plan(trace))
    for name, row in table.items():
        print(
            f"{name}: planned {row['planned_ns']:.1f} ns, plain {row['plain_ns']:.1f} ns, "
            f"{row['times_faster']:.1f} times; hits {row['hit_rate']:.2%}"
        )
    if not arguments:
        print(write_result("planned_speed", table))


if __name__ == "__main__":
    main(sys.argv[1:])
