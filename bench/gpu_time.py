"""Real steps on a GPU beside the estimated step times: `make gpu SUITE=time`.

    python -m bench.gpu_time [--budget 450] [--only TEXT] [--dry-run]

For each job of `bench.gpu_jobs`: the script runs for real with a CUDA event after every step, then
`memplan estimate` answers in a process that sees no GPU. Then single kernels, timed alone, beside
what the time model says of them. Unattended, no network; what fails or finds no time is told in
`bench/results/gpu_time.json`, which is written after every job.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_estimate import SCRIPT, Suite, gpu_argument
from bench.gpu_jobs.jobs import JOBS
from bench.gpu_suite import last_line, run_suite, suite_parser
from bench.results import ROOT, write_result

BUDGET_SECONDS = 450.0
JOB_SECONDS = 90.0
KERNEL_SECONDS = 60.0
STEPS = ["--steps", "16"]


@dataclass
class TimeSuite(Suite):
    """One run of the suite."""

    def time_steps(self, name: str, arguments: list[str]) -> dict[str, Any]:
        """The real run of a job: the median of its steps, or `error`."""
        out = self.work / f"{name}.json"
        command = [
            sys.executable, "-m", "bench.gpu_jobs.time_steps", str(out), str(SCRIPT),
            *arguments, *STEPS,
        ]  # fmt: skip
        return self.ask(command, out, JOB_SECONDS, {})

    def time_kernels(self) -> dict[str, Any]:
        """Single kernels, once the card is known."""
        out = self.work / "kernels.json"
        command = [sys.executable, "-m", "bench.gpu_jobs.time_kernels", str(out), self.gpu]
        return self.ask(command, out, KERNEL_SECONDS, {})

    def job(self, name: str) -> None:
        """Measure and estimate one job, and print its line."""
        arguments = shlex.split(JOBS[name])
        found = self.jobs[name] = {"measured": self.time_steps(name, arguments)}
        measured = found["measured"]
        if not self.gpu and "device_name" in measured:
            self.gpu = gpu_argument(measured)
        if measured.get("error"):
            print(f"{name:30s} {last_line(measured['error'])}", flush=True)
            return
        answer = self.estimate(name, [*arguments, *STEPS], self.gpu)
        if answer.get("step_seconds") is None:
            found["error"] = answer.get("error", "no step time")
            print(f"{name:30s} {last_line(found['error'])}", flush=True)
            return
        kept = ("step_seconds", "step_low_seconds", "step_high_seconds", "kernel_seconds")
        found["estimated"] = {key: answer[key] for key in kept}
        real, low, high = measured["step_seconds"], answer[kept[1]], answer[kept[2]]
        found["error_of_estimate"] = answer["step_seconds"] / real - 1
        found["held"] = low <= real <= high
        print(f"{name:30s} {1e3 * real:8.1f} ms  {100 * found['error_of_estimate']:+.1f} %")


def summarize(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Errors of the jobs that were measured and estimated."""
    compared = {name: job for name, job in jobs.items() if "held" in job}
    off = sorted(abs(job["error_of_estimate"]) for job in compared.values())
    return {
        "job_count": len(compared),
        "median_error": statistics.median(off) if off else None,
        "held": sum(job["held"] for job in compared.values()),
        "failed": sorted(set(jobs) - set(compared)),
    }


def run_jobs(suite: TimeSuite, names: list[str]) -> dict[str, Any]:
    """All of them and the kernels; gives the summary."""
    suite.each(names, suite.job, lambda: save(suite, {}))
    kernels = suite.time_kernels() if suite.gpu else {"error": "no card was found"}
    save(suite, kernels)
    return summarize(suite.jobs)


def save(suite: TimeSuite, kernels: dict[str, Any]) -> None:
    data = {"gpu": suite.gpu, **summarize(suite.jobs), "kernels": kernels, "jobs": suite.jobs}
    write_result("gpu_time", data)


def main(arguments: list[str] | None = None) -> int:
    options = suite_parser(__doc__, BUDGET_SECONDS).parse_args(arguments)

    def measure(work: Path, names: list[str]) -> int:
        summary = run_jobs(TimeSuite(work, budget=options.budget, at_once=options.at_once), names)
        print(json.dumps(summary, indent=1))
        return 1 if summary["failed"] else 0

    shown = SCRIPT.relative_to(ROOT)
    commands = {name: f"{name}: python {shown} {JOBS[name]} {' '.join(STEPS)}" for name in JOBS}
    return run_suite(options, commands, measure)


if __name__ == "__main__":
    sys.exit(main())
