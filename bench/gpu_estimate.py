"""Real runs on a GPU beside our estimates of the same scripts: `make gpu SUITE=estimate`.

    python -m bench.gpu_estimate [--budget 450] [--only TEXT] [--dry-run]
    python -m bench.gpu_estimate --again       # no GPU: estimates anew what was measured once

For each job: the script runs for real in a process of its own (peaks of PyTorch's allocator, of the
card by NVML, and every request), then `memplan estimate` runs in another that sees no GPU. Also
measured: the CUDA context by stage and the memory of single kernels. Unattended, no network; what
fails or finds no time is told in the results, which are written after every job:
`bench/results/gpu_estimate.json` and `gpu_scratch.json`.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import gpu_turns
from bench.gpu_jobs.jobs import JOBS
from bench.gpu_suite import (
    NO_TIME,
    TimedSuite,
    failure,
    last_line,
    measured_once,
    run_suite,
    suite_parser,
)
from bench.results import ROOT, write_result

FOLDER = ROOT / "bench" / "gpu_jobs"
SCRIPT = FOLDER / "train.py"
BUDGET_SECONDS = 450.0
JOB_SECONDS = 90.0
ESTIMATE_SECONDS = 240.0
SCRATCH_SECONDS = 75.0
CONTEXT_SECONDS = 60.0
MEASURES = {
    # error: (measured, estimated)
    "allocated": ("max_memory_allocated", "allocated_peak_bytes"),
    "reserved": ("max_memory_reserved", "reserved_peak_bytes"),
    "process": ("nvml_peak_bytes", "peak_bytes"),
}


@dataclass
class Suite(TimedSuite):
    """One run of the suite, and what it has found so far."""

    budget: float = BUDGET_SECONDS
    gpu: str = ""
    """The card as `memplan estimate --gpu` takes it; empty: found out from the first job."""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    context: list[dict[str, Any]] = field(default_factory=list)
    measured_on: dict[str, Any] | None = None
    """Where and when, if not here and now."""

    def job(self, name: str) -> None:
        """Measure and estimate one job, and print its line."""
        arguments = shlex.split(JOBS[name])
        measured = self.measure(name, arguments)
        self.jobs[name] = {"arguments": JOBS[name], "measured": measured}
        if not self.gpu and "device_name" in measured:
            self.gpu = gpu_argument(measured)
        if self.gpu:
            finish(self, name, self.estimate(name, arguments, self.gpu))

    def measure(self, name: str, arguments: list[str]) -> dict[str, Any]:
        """The real run of a job: its peaks, or `error`."""
        out, snapshot = self.work / f"{name}.json", self.work / f"{name}.pickle"
        command = [
            sys.executable, "-m", "memplan.runtime.measure", str(out), str(snapshot), str(SCRIPT),
            *arguments,
        ]  # fmt: skip
        began = self.clock()
        found = self.ask(command, out, JOB_SECONDS, {})
        return {"seconds": round(self.clock() - began, 1), **found}

    def estimate(self, name: str, arguments: list[str], gpu: str) -> dict[str, Any]:
        """Our answer for the same command, in a process that sees no GPU; or `error`."""
        trace = self.work / f"{name}.trace"
        command = [
            sys.executable, "-m", "memplan", "estimate", "--json", "--gpu", gpu, "-o", str(trace),
            str(SCRIPT), *arguments,
        ]  # fmt: skip
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        with self.host:
            seconds = self.time_for(ESTIMATE_SECONDS)
            if not seconds:
                return {"error": NO_TIME}
            began = self.clock()
            code, stdout, stderr = self.run(command, env, seconds)
            took = round(self.clock() - began, 1)
        if code not in (0, 3):
            return {"error": failure(code, stderr), "seconds": took}
        answer = json.loads(stdout)
        answer.pop("curve", None)
        return {**answer, "seconds": took}

    def measure_context(self) -> None:
        """The process outside the allocator, with kernels loaded lazily and eagerly."""
        for loading in ("LAZY", "EAGER"):
            out = self.work / f"context-{loading}.json"
            command = [sys.executable, str(FOLDER / "context.py"), str(out)]
            found = self.ask(command, out, CONTEXT_SECONDS, {"CUDA_MODULE_LOADING": loading})
            self.context.append({"module_loading": loading, **found})

    def measure_scratch(self) -> dict[str, Any]:
        """Memory of single kernels, as far as the time lasts."""
        out = self.work / "scratch.json"
        seconds = 0.8 * self.time_for(SCRATCH_SECONDS)
        command = [sys.executable, str(FOLDER / "scratch.py"), str(out), str(seconds)]
        return self.ask(command, out, SCRATCH_SECONDS + 20, {})


def gpu_argument(measured: dict[str, Any]) -> str:
    """The card as `--gpu` takes it: its name where a profile knows it, else its size."""
    from memplan.types.device import find_profile
    from memplan.types.errors import UsageError

    try:
        return find_profile(measured["device_name"]).name
    except UsageError:
        major, minor = measured["capability"]
        return f"{measured['device_total_bytes'] / 2**30:.2f}GiB:sm{major}{minor}"


def errors(measured: dict[str, Any], estimated: dict[str, Any]) -> dict[str, float]:
    """Signed relative errors by measure, of those that both sides know."""
    return {
        name: estimated[theirs] / measured[ours] - 1
        for name, (ours, theirs) in MEASURES.items()
        if measured.get(ours) and theirs in estimated
    }


def explain(work: Path, name: str) -> dict[str, Any]:
    """Requests and segments of the real run against the trace; `error` when a file is unusable."""
    from bench.divergence import compare_requests, requests
    from memplan.capturing.importers.snapshot import read_snapshot
    from memplan.simulate import replay_report
    from memplan.types.errors import MemplanError
    from memplan.types.trace_file import load_trace

    try:
        real = read_snapshot(work / f"{name}.pickle")
        foreseen = load_trace(work / f"{name}.trace")
        found = compare_requests(requests(real), requests(foreseen))
        replay = replay_report(real)
    except MemplanError as error:
        return {"error": str(error)[:500]}
    found["replay"] = {
        key: replay[key] for key in ("reserved_peak_bytes", "segments_logged", "segments_matched")
    }
    return found


def summarize(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Worst and median errors of the jobs that were measured and estimated."""
    compared = {name: job["errors"] for name, job in jobs.items() if job.get("errors")}
    summary: dict[str, Any] = {"job_count": len(compared)}
    for measure in MEASURES:
        sizes = sorted(abs(found[measure]) for found in compared.values() if measure in found)
        if sizes:
            summary[f"worst_{measure}_error"] = sizes[-1]
            summary[f"median_{measure}_error"] = sizes[len(sizes) // 2]
    summary["failed"] = sorted(set(jobs) - set(compared))
    return summary


def finish(suite: Suite, name: str, estimated: dict[str, Any]) -> None:
    """Compare a job whose two runs are over, and print its line."""
    job = suite.jobs[name]
    job.pop("errors", None)
    job["estimated"] = {k: v for k, v in estimated.items() if isinstance(v, (int, float, str))}
    if "error" in estimated or job["measured"].get("error"):
        reason = job["measured"].get("error") or estimated["error"]
        print(f"{name:30s} {last_line(reason)}", flush=True)
        return
    job["errors"] = errors(job["measured"], estimated)
    if suite.measured_on is None:
        job["difference"] = explain(suite.work, name)
    shown = "  ".join(f"{key} {100 * value:+.2f} %" for key, value in job["errors"].items())
    print(f"{name:30s} {shown}", flush=True)


def save(suite: Suite) -> None:
    data = {"gpu": suite.gpu, **summarize(suite.jobs), "context": suite.context, "jobs": suite.jobs}
    if suite.measured_on is not None:
        data["measured_on"] = suite.measured_on
    write_result("gpu_estimate", data)


def run_jobs(suite: Suite, names: list[str]) -> None:
    """Real runs, estimates beside them on the CPU; saved after every job."""
    suite.each(names, suite.job, lambda: save(suite))


def again(work: Path, names: list[str]) -> int:
    """Estimate anew each job that was measured. Needs no GPU."""
    before = measured_once("gpu_estimate")
    if before is None:
        return 2
    data, on = before
    suite = Suite(
        work, budget=math.inf, gpu=data["gpu"], jobs=data["jobs"], context=data["context"]
    )
    suite.measured_on = on
    known = [name for name in names if not suite.jobs[name]["measured"].get("error")]

    def job(name: str) -> None:
        found = suite.jobs[name].get("difference", {})  # but for the replay, of another estimate
        suite.jobs[name]["difference"] = {"replay": found["replay"]} if "replay" in found else {}
        finish(suite, name, suite.estimate(name, shlex.split(JOBS[name]), suite.gpu))

    suite.each(known, job, lambda: save(suite))
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = suite_parser(__doc__, BUDGET_SECONDS).parse_args(arguments)

    def measure(work: Path, names: list[str]) -> int:
        suite = Suite(work, budget=options.budget, at_once=options.at_once)
        with gpu_turns.together(), ThreadPoolExecutor() as pool:
            pool.submit(suite.measure_context)
            scratch = None if options.only else pool.submit(suite.measure_scratch)
            run_jobs(suite, names)
        if scratch is not None:
            write_result("gpu_scratch", scratch.result())
        save(suite)
        summary = summarize(suite.jobs)
        print(json.dumps(summary, indent=1))
        return 1 if summary["failed"] else 0

    commands = {name: f"{name}: python {SCRIPT.relative_to(ROOT)} {JOBS[name]}" for name in JOBS}
    return run_suite(options, commands, measure, again)


if __name__ == "__main__":
    sys.exit(main())
