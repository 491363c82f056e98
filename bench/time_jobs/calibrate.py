"""What cards of other generations reach, from a few published language models:
`python -m bench.time_jobs.calibrate`.

Prints two numbers for `kernel_times.toml`: the share of the peak rate that large matrix products
reach in training on A100 and on H100. Only rows of `published.csv`
that say `calibrate` go in; all others are there to check.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from bench.time_jobs.rows import published, trace_path
from memplan.timing.step import step_time
from memplan.timing.table import KernelTime, KernelTimes, kernel_times
from memplan.types.device import find_profile
from memplan.types.trace_file import load_trace

GENERATIONS = ("8.0", "9.0")
GUESS = np.log([0.9, 0.84])
OFF = np.array([0.2, 0.2])
OLDER_ATTENTION = 0.5
"""The tables are of spring 2023, before FlashAttention-2, which "is around 2x faster than
FlashAttention" (Dao, 2023)."""


def of_2023(table: KernelTimes) -> KernelTimes:
    """With the attention kernels that the tables were measured with."""
    older = {
        name: KernelTime(one.compute * OLDER_ATTENTION, one.memory)
        for name, one in table.kernels.items()
        if name.startswith("attention")
    }
    return msgspec.structs.replace(table, kernels={**table.kernels, **older})


def changed(table: KernelTimes, numbers: npt.NDArray[np.float64]) -> KernelTimes:
    """The table with other shares of the generations."""
    generations = dict(table.generations)
    for name, share in zip(GENERATIONS, np.exp(numbers).tolist(), strict=True):
        generations[name] = msgspec.structs.replace(generations[name], matmul=share)
    return msgspec.structs.replace(table, generations=generations)


def main() -> int:
    jobs = [job for job in published() if job.calibrates and trace_path(job).exists()]
    traces = [load_trace(trace_path(job)) for job in jobs]

    def residuals(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        table = changed(of_2023(kernel_times()), numbers)
        found = []
        for job, trace in zip(jobs, traces, strict=True):
            step = step_time(trace, find_profile(job.gpu), table)
            assert step is not None
            found.append(np.log(step.seconds / job.step_seconds) / 0.05)
        return np.concatenate((found, (numbers - GUESS) / OFF))

    solved = least_squares(residuals, GUESS, x_scale=OFF, diff_step=0.02)
    table = changed(kernel_times(), solved.x)
    print(f"{len(jobs)} jobs")
    for name in GENERATIONS:
        print(f"generations.{name}.matmul = {table.generations[name].matmul:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
