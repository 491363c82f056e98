"""The efficiencies of kernels, from measured training steps: `python -m bench.calibrate_time`.

Reads the measured table where it lies, and the traces that `bench.timm_table` has captured of its
rows, and writes the calibrated part of `src/memplan/timing/kernel_times.toml`. All rows go in that
have a trace, so the file says how many those were.

What is fitted is two numbers for each class of kernels, the time between kernels and the gain of
the L2 cache: least squares on the logarithm of step times (soft l1, so that single rows count for
less), with a guess for each number and how far it may be off: what is known of such kernels from
other measurements. No number is a model's own.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from bench.pages import write_between
from bench.timm_table.capture import GPU, trace_path
from bench.timm_table.rows import TimmRow, read_rows
from memplan.timing.host import host_seconds
from memplan.timing.seconds import IN_L2, SHARPNESS, peak_rates
from memplan.timing.step import steady_ops
from memplan.timing.table import KernelTime, KernelTimes, kernel_times
from memplan.timing.workload import workload
from memplan.types.device import find_profile
from memplan.types.trace_file import load_trace

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
CHANGED = ("ecaresnext50t_32x4d",)
"""Models that are others in today's timm: 15.41 million parameters in the table, 25.05 now."""
TABLE = Path(__file__).parent.parent / "src" / "memplan" / "timing" / "kernel_times.toml"
BEGIN = "# Written by bench.calibrate_time; begin."
END = "# End of what bench.calibrate_time writes."

GUESSES: tuple[tuple[str, tuple[float, float], tuple[float, float]], ...] = (
    ("depthwise", (0.15, 0.8), (0.5, 0.5)),
    ("conv_grouped", (0.3, 0.3), (0.6, 0.4)),
    ("conv_layout", (0.8, 0.5), (0.8, 0.6)),
    ("conv", (0.85, 0.12), (0.8, 0.25)),
    ("matmul_batched_unaligned", (0.5, 0.12), (0.7, 0.3)),
    ("matmul_unaligned", (0.5, 0.12), (0.7, 0.3)),
    ("matmul", (0.95, 0.04), (0.8, 0.1)),
    ("pointwise", (0.8, 0.5), (0.85, 0.08)),
    ("copy", (0.8, 0.5), (0.85, 0.08)),
    ("batch_norm", (0.8, 0.5), (0.65, 0.35)),
    ("transpose", (0.8, 0.5), (0.65, 0.3)),
    ("broadcast", (0.8, 0.5), (0.65, 0.3)),
    ("reduction_strided", (0.8, 0.5), (0.65, 0.3)),
    ("layer_norm_backward", (0.8, 0.5), (0.5, 0.4)),
    ("group_norm_backward", (0.8, 0.5), (0.5, 0.4)),
    ("softmax_backward", (0.8, 0.5), (0.5, 0.4)),
    ("pool_backward", (0.8, 0.5), (0.5, 0.4)),
    ("scatter", (0.8, 0.5), (0.5, 0.4)),
    ("index", (0.8, 0.5), (0.5, 0.4)),
    ("", (0.8, 0.5), (0.8, 0.25)),
)
"""By the beginning of a class's name, the first that fits: compute and memory, each with the
logarithm that it may be off by."""
LAUNCH_GUESS = (3.0, 0.3)
"""Microseconds between the ends of two kernels: launch latency on the device and the last block."""
L2_GUESS = (2.0, 0.4)
SPREAD = 0.08
"""Logarithm by which a step may be off before it counts for less."""


@dataclass(frozen=True)
class Steps:
    """Measured steps, and the kernels of all of them in columns."""

    rows: list[TimmRow]
    seconds: F64
    host: F64
    """What the host takes for each step."""
    kinds: list[str]
    kind: I64
    job: I64
    count: F64
    arithmetic: F64
    """Seconds at the card's peak rate."""
    traffic: F64
    """Seconds at the card's bandwidth."""
    cached: npt.NDArray[np.bool_]


def read_captured() -> list[TimmRow]:
    """The table's rows with a trace, of models that have not changed; none, and a sentence on
    stderr, where something is missing."""
    try:
        rows = [row for row in read_rows() if trace_path(row).exists()]
        rows = [row for row in rows if row.model not in CHANGED]
    except OSError as error:
        print(f"no measured table: {error}; set MEMPLAN_SHARED_DATA", file=sys.stderr)
        return []
    if not rows:
        print("no traces: run `python -m bench.timm_table` first", file=sys.stderr)
    return rows


def steps_of(rows: list[TimmRow]) -> Steps:
    """The kernels of the rows' steps, from their traces."""
    card = find_profile(GPU)
    kinds: dict[str, int] = {}
    host, columns = [], []
    for number, row in enumerate(rows):
        trace = load_trace(trace_path(row))
        start, stop = steady_ops(trace)
        work = workload(trace, card.sm_count, start, stop)
        runs = np.bincount(work.which, minlength=len(work.first) - 1)
        each = np.repeat(runs, np.diff(work.first)).astype(np.float64)
        kind = [kinds.setdefault(name, len(kinds)) for name in work.kind]
        arithmetic = work.flops / peak_rates(work.rate, card)
        columns.append((kind, [number] * len(kind), each, arithmetic, work.nbytes))
        host.append(float(host_seconds(trace, kernel_times().host, start, stop).sum()))
    kind_of, job, each, arithmetic, nbytes = (
        np.concatenate([np.asarray(found[place]) for found in columns]) for place in range(5)
    )
    return Steps(
        rows=rows,
        seconds=np.array([row.step_seconds for row in rows]),
        host=np.array(host),
        kinds=list(kinds),
        kind=kind_of.astype(np.int64),
        job=job.astype(np.int64),
        count=each,
        arithmetic=arithmetic,
        traffic=nbytes / card.memory_bandwidth_bytes_per_second,
        cached=nbytes <= IN_L2 * card.l2_bytes,
    )


def guesses(kinds: list[str]) -> tuple[F64, F64]:
    """Logarithms of the guesses for all numbers, and how far each may be off."""
    found = [next((c, m) for start, c, m in GUESSES if name.startswith(start)) for name in kinds]
    pairs = [c for c, _ in found] + [m for _, m in found] + [LAUNCH_GUESS, L2_GUESS]
    return np.log([value for value, _ in pairs]), np.array([off for _, off in pairs])


def predicted(steps: Steps, numbers: F64) -> tuple[F64, F64]:
    """Seconds of each step by the logarithms of all numbers, and the derivatives of the logarithm
    of these seconds."""
    kinds, jobs = len(steps.kinds), len(steps.rows)
    value = np.exp(numbers)
    compute, memory, (launch, gain) = value[:kinds], value[kinds:-2], value[-2:]
    arithmetic = (steps.arithmetic / compute[steps.kind]) ** SHARPNESS
    slowed = memory[steps.kind] * np.where(steps.cached, gain, 1.0)
    traffic = (steps.traffic / slowed) ** SHARPNESS
    both = arithmetic + traffic
    busy = steps.count * both ** (1 / SHARPNESS)
    share = arithmetic / np.maximum(both, 1e-300)
    launches = steps.count * launch * 1e-6
    device = np.bincount(steps.job, busy + launches, jobs)
    slope = np.zeros((jobs, len(numbers)))
    np.add.at(slope, (steps.job, steps.kind), -busy * share)
    np.add.at(slope, (steps.job, kinds + steps.kind), -busy * (1 - share))
    slope[:, -2] = np.bincount(steps.job, launches, jobs)
    slope[:, -1] = np.bincount(steps.job, np.where(steps.cached, -busy * (1 - share), 0.0), jobs)
    waits = steps.host > device
    slope = np.where(waits[:, None], 0.0, slope / device[:, None])
    return np.maximum(device, steps.host), slope


def fit(steps: Steps, use: npt.NDArray[np.bool_]) -> F64:
    """Logarithms of all numbers, from the steps in `use`."""
    guess, off = guesses(steps.kinds)
    measured = np.log(steps.seconds[use])

    def residuals(numbers: F64) -> F64:
        found, _ = predicted(steps, numbers)
        return np.concatenate(((np.log(found[use]) - measured) / SPREAD, (numbers - guess) / off))

    def slopes(numbers: F64) -> F64:
        _, slope = predicted(steps, numbers)
        return np.vstack((slope[use] / SPREAD, np.diag(1 / off)))

    solved = least_squares(
        residuals, guess, slopes, loss="soft_l1", max_nfev=40, x_scale=off, xtol=1e-6
    )
    return np.asarray(solved.x, np.float64)


def as_table(steps: Steps, numbers: F64, before: KernelTimes) -> KernelTimes:
    """The table with what was fitted in the place of what was there."""
    kinds = len(steps.kinds)
    value = np.exp(numbers)
    found = {
        name: KernelTime(round(float(value[i]), 3), round(float(value[kinds + i]), 3))
        for i, name in enumerate(steps.kinds)
    }
    return msgspec.structs.replace(
        before,
        launch_us=round(float(value[-2]), 2),
        l2_gain=round(float(value[-1]), 2),
        kernels={**before.kernels, **found},
    )


def written(steps: Steps, numbers: F64) -> str:
    """The calibrated part of the file."""
    table = as_table(steps, numbers, kernel_times())
    models = len({row.model for row in steps.rows})
    lines = [
        "",
        f"# From {len(steps.rows)} training steps of {models} models of the table `timm`.",
        f"launch_us = {table.launch_us}",
        f"l2_gain = {table.l2_gain}",
        "",
        "[kernels]",
        *(
            f"{name} = {{ compute = {one.compute}, memory = {one.memory} }}"
            for name, one in sorted(table.kernels.items())
            if name in steps.kinds
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    rows = read_captured()
    if not rows:
        return 2
    steps = steps_of(rows)
    numbers = fit(steps, np.ones(len(rows), bool))
    write_between(TABLE, BEGIN, END, written(steps, numbers))
    found, _ = predicted(steps, numbers)
    errors = np.abs(found / steps.seconds - 1)
    print(f"{len(rows)} steps: median error {np.median(errors):.1%}", end=", ")
    print(f"90th percentile {np.quantile(errors, 0.9):.1%}; {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
