"""How near the estimated step times come to measured ones: `python -m bench.step_time`.

- Image models: the rows of timm's table that `bench.timm_table` has captured, five-fold
  cross-validated by family: each fifth of the families is priced by efficiencies that were fitted
  to the others, with an interval that comes from the others too. Beside it the plain roofline that
  memplan used before (60 % of the peak rate, 80 % of the bandwidth, 3 microseconds at least).
- Language models: the rows of `bench/time_jobs/published.csv` that nothing was calibrated on.

- What it costs: the share of an estimate's time that goes into the step's.

Writes `bench/results/step_time.json`; the first two need the captures of `bench.timm_table` and
`bench.time_jobs.rows`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.calibrate_time import as_table, fit, read_captured, steps_of
from bench.process import watch
from bench.results import ROOT, write_result
from bench.time_jobs.calibrate import of_2023
from bench.time_jobs.rows import SOURCES, published
from bench.time_jobs.rows import trace_path as job_path
from bench.timm_table.capture import GPU, trace_path
from bench.timm_table.rows import TimmRow, families
from memplan.timing.seconds import peak_rates
from memplan.timing.step import steady_ops, step_time
from memplan.timing.table import KernelTimes, kernel_times
from memplan.types.device import DeviceProfile, find_profile
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace

F64 = npt.NDArray[np.float64]
FOLDS = 5
SEED = 1729
COVERED = 0.86
"""Of the steps that an interval is made from; a little more than what it must hold of others."""


def roofline_seconds(trace: Trace, card: DeviceProfile) -> float:
    """The step by the plain roofline, its operators one after the other."""
    start, stop = steady_ops(trace)
    ops = trace.ops
    flops, moved = ops.flops[start:stop], np.maximum(ops.moved_bytes[start:stop], 0)
    texts = [trace.strings[number] for number in ops.operands[start:stop]]
    dtypes = [text.partition(":")[2].partition(":")[0] for text in texts]
    arithmetic = flops / (peak_rates(dtypes, card) * 0.6)
    traffic = moved / (card.memory_bandwidth_bytes_per_second * 0.8)
    busy = np.maximum(np.maximum(arithmetic, traffic), 3e-6)
    return float(np.where((flops == 0) & (moved == 0), 0.0, busy).sum())


def seconds(trace: Trace, card: DeviceProfile, table: KernelTimes) -> float:
    found = step_time(trace, card, table)
    assert found is not None
    return found.seconds


def folds(rows: list[TimmRow]) -> npt.NDArray[np.int64]:
    """By row: the fold of its model's family."""
    family = families([row.model for row in rows])
    names = np.random.default_rng(SEED).permutation(sorted(set(family.values()))).tolist()
    place = {name: number for number, name in enumerate(names)}
    return np.array([place[family[row.model]] % FOLDS for row in rows])


def interval(ratio: F64) -> tuple[float, float]:
    """Factors around an estimate that hold what was measured over estimated."""
    out = (1 - COVERED) / 2
    low, high = np.quantile(ratio, [out, 1 - out])
    return min(float(low), 1.0), max(float(high), 1.0)


def cross_validated(rows: list[TimmRow]) -> dict[str, Any]:
    card = find_profile(GPU)
    steps = steps_of(rows)
    fold = folds(rows)
    found, plain = np.zeros(len(rows)), np.zeros(len(rows))
    for number in range(FOLDS):
        table = as_table(steps, fit(steps, fold != number), kernel_times())
        for i in np.flatnonzero(fold == number).tolist():
            trace = load_trace(trace_path(rows[i]))
            found[i] = seconds(trace, card, table)
            plain[i] = roofline_seconds(trace, card)
        print(f"fold {number + 1} of {FOLDS}", flush=True)
    ratio = steps.seconds / found
    held = np.zeros(len(rows), bool)
    for number in range(FOLDS):
        low, high = interval(ratio[fold != number])
        held |= (fold == number) & (low <= ratio) & (ratio <= high)
    low, high = interval(ratio)
    return {
        "models": len({row.model for row in rows}),
        **errors(found, steps.seconds),
        "held": float(held.mean()),
        "interval": [round(low, 3), round(high, 3)],
        "roofline": errors(plain, steps.seconds),
        "rows": {
            row.key: [round(row.step_seconds * 1e3, 2), round(one * 1e3, 2)]
            for row, one in zip(rows, found.tolist(), strict=True)
        },
    }


def errors(found: F64, measured: F64) -> dict[str, Any]:
    off = np.abs(found / measured - 1)
    return {
        "steps": len(off),
        "median_error": float(np.median(off)),
        "p90_error": float(np.quantile(off, 0.9)),
    }


def language_models() -> dict[str, Any]:
    table = of_2023(kernel_times())
    rows: list[dict[str, Any]] = []
    for job in published():
        if job.calibrates or not job_path(job).exists():
            continue
        trace, card = load_trace(job_path(job)), find_profile(job.gpu)
        step = step_time(trace, card, table)
        assert step is not None
        rows.append(
            {
                "job": job.key,
                "source": SOURCES[job.source],
                "tokens_per_second": job.tokens_per_second,
                "estimated": round(job.tokens_per_second * job.step_seconds / step.seconds, 1),
                "measured_seconds": round(job.step_seconds, 4),
                "estimated_seconds": round(step.seconds, 4),
                "held": bool(step.low_seconds <= job.step_seconds <= step.high_seconds),
                "roofline_seconds": round(roofline_seconds(trace, card), 4),
            }
        )
        print(f"{job.key:45s} {job.step_seconds:7.3f} s measured, {step.seconds:7.3f} estimated")
    measured = np.array([row["measured_seconds"] for row in rows])
    return {
        "jobs": len(rows),
        "calibrated_on": [job.key for job in published() if job.calibrates],
        **errors(np.array([row["estimated_seconds"] for row in rows]), measured),
        "held": float(np.mean([row["held"] for row in rows])),
        "roofline": errors(np.array([row["roofline_seconds"] for row in rows]), measured),
        "rows": rows,
    }


def cost() -> dict[str, float]:
    """Seconds of an estimate of GPT-2 as a user types it, and of the step's time within it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.trace"
        command = [
            sys.executable, "-m", "memplan", "estimate", "--json", "--gpu", "rtx4090",
            "-o", str(path), "examples/gpt2/train.py",
        ]  # fmt: skip
        whole = watch(command, cwd=ROOT).seconds
        trace = load_trace(path)
    card, each = find_profile("rtx4090"), []
    for _ in range(5):
        began = time.perf_counter()
        step_time(trace, card)
        each.append(time.perf_counter() - began)
    share = statistics.median(each) / whole
    return {"estimate_seconds": whole, "step_time_seconds": statistics.median(each), "share": share}


def main() -> int:
    rows = read_captured()
    if not rows:
        return 2
    data = {"cost": cost(), "images": cross_validated(rows), "language": language_models()}
    for name, found in data.items():
        shown = {key: value for key, value in found.items() if key != "rows"}
        print(f"{name}: {shown}")
    print(write_result("step_time", data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
