"""Training on the planned allocator, on a GPU: `make gpu SUITE=run`.

    python -m bench.gpu_run [--budget 1500] [--only TEXT] [--part steps|batches] [--dry-run]

Six jobs (`bench/gpu_run_jobs`), each run in fresh processes on the same work: PyTorch's allocator
as it is, with expandable segments, and memplan with a plan from a recording, with one from a
capture that saw no GPU, and with one that it makes while the job runs. Part `steps`: reserved
memory, efficiency, step times in pairs, losses bit for bit. Part `batches`: the largest batch that
each can train. Unattended, no network; what fails or finds no time is told in
`bench/results/gpu_run.json` and `gpu_run_batches.json`, which are written after every job.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import gpu_turns
from bench.gpu_run_jobs.train import WARM_UP
from bench.gpu_suite import (
    CUBLAS_WORKSPACE,
    NO_TIME,
    TimedSuite,
    failure,
    run_suite,
    suite_parser,
)
from bench.results import ROOT, write_result

SCRIPT = ROOT / "bench" / "gpu_run_jobs" / "train.py"
JOBS = (
    "gpt2", "llama-1b", "llama-1b-recomputed", "llama-1b-accumulated", "moe", "variable-length",
)  # fmt: skip
ROUTED = ("moe", "variable-length")
"""Sizes differ from step to step."""
MODES = ("native", "expandable", "planned", "captured")
GROWN = ("gpt2", "llama-1b", "moe")
"""Their largest batches are looked for."""
BUDGET_SECONDS = 1500.0
PROCESS_SECONDS = 150.0
PAIRS = 3
STEPS = 24
BATCH_STEPS = 8
CONF = "PYTORCH_ALLOC_CONF"


@dataclass
class Suite(TimedSuite):
    """One run of the suite, and what it has found so far."""

    budget: float = BUDGET_SECONDS
    gpu: str = ""
    """The card as `memplan plan --gpu` takes it."""
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    pairs: int = PAIRS
    """Native runs beside planned ones, for the step times."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.numbers = 0

    def perform(self, words: list[str], *, gpu: bool = True, conf: str = "") -> str:
        """Run one command; what went wrong, or the empty string."""
        environment = {**os.environ, **CUBLAS_WORKSPACE}
        paths = (str(ROOT), environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment.pop(CONF, None)
        if conf:
            environment[CONF] = conf
        if not gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
            environment.pop(gpu_turns.FOLDER, None)
        with self.card if gpu else self.host:
            seconds = self.time_for(PROCESS_SECONDS)
            if not seconds:
                return NO_TIME
            code, _, stderr = self.run([sys.executable, *words], environment, seconds)
        return "" if code == 0 else failure(code, stderr)

    def file(self, suffix: str) -> Path:
        """A new file in the work folder."""
        self.numbers += 1
        return self.work / f"{self.numbers}.{suffix}"

    def capture(self, job: str, batch: int = 0) -> Path | str:
        """A plan from a capture without a GPU, or what went wrong."""
        plan = self.file("plan")
        out = self.work / "never-written.json"
        own = ["-m", "memplan", "plan", "-o", str(plan), *(["--gpu", self.gpu] if self.gpu else [])]
        wrong = self.perform([*own, *script(out, job, batch, STEPS)], gpu=False)
        return wrong or plan

    def record(self, job: str) -> tuple[Path | str, dict[str, Any]]:
        """A plan from a recorded run, or what went wrong; and that run."""
        trace, plan = self.file("trace"), self.file("plan")
        recorded = self.train(job, memplan=["--record", str(trace)])
        if "error" in recorded:
            return recorded["error"], recorded
        wrong = self.perform(
            ["-m", "memplan", "plan", "-o", str(plan), "--from-trace", str(trace)], gpu=False
        )
        return wrong or plan, recorded

    def train(
        self,
        job: str,
        *,
        batch: int = 0,
        steps: int = STEPS,
        conf: str = "",
        memplan: list[str] | None = None,
    ) -> dict[str, Any]:
        """One run of a job: what it measured, with memplan's own account under `stats`; or
        `error`."""
        out, stats = self.file("json"), self.file("stats.json")
        words = script(out, job, batch, steps)
        if memplan is not None:
            words = ["-m", "memplan", "run", *memplan, "--stats", str(stats), *words]
        wrong = self.perform(words, conf=conf)
        if wrong or not out.exists():
            return {"error": wrong or "nothing was measured"}
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if stats.exists():
            found["stats"] = json.loads(stats.read_text(encoding="utf-8"))
        return found

    def in_mode(self, mode: str, job: str, plan: Path | str, **more: Any) -> dict[str, Any]:
        """One run in one of `MODES`; `plan` as `capture` and `record` return it."""
        if mode in ("native", "expandable"):
            conf = "expandable_segments:True" if mode == "expandable" else ""
            return self.train(job, conf=conf, **more)
        if isinstance(plan, str):
            return {"error": f"no plan: {plan}"}
        return self.train(job, memplan=["--plan", str(plan)], **more)

    # Part `steps`

    def measure(self, job: str, captured: Future[Path | str]) -> dict[str, Any]:
        """All modes of one job, the pairs of native and planned by turns."""
        native = self.in_mode("native", job, "")
        recorded_plan, recorded = self.record(job)
        planned = self.in_mode("planned", job, recorded_plan)
        runs = {
            "native": native,
            "recorded": recorded,
            "online": self.train(job, memplan=[]),
            "planned": planned,
            "expandable": self.in_mode("expandable", job, ""),
            "captured": self.in_mode("captured", job, captured.result()),
        }
        pairs = [(native, planned)]
        for _ in range(self.pairs - 1):
            pairs.append(
                (self.in_mode("native", job, ""), self.in_mode("planned", job, recorded_plan))
            )
        return {
            "runs": {name: brief(run) for name, run in runs.items()},
            "step_time": paired(pairs),
            "same_losses": {
                name: "losses" in run and run["losses"] == native.get("losses")
                for name, run in runs.items()
            },
        }

    def run_steps(self, names: list[str]) -> None:
        with ThreadPoolExecutor() as pool:
            captured = {name: pool.submit(self.capture, name) for name in names}

            def job(name: str) -> None:
                self.steps[name] = self.measure(name, captured[name])
                print(f"{name:22s} {line(self.steps[name])}", flush=True)

            def save() -> None:
                write_result("gpu_run", {**summarize(self.steps), "jobs": self.steps})

            self.each(names, job, save)

    # Part `batches`

    def run_batches(self, names: list[str]) -> None:
        for name in names:
            self.batches[name] = {
                mode: self.largest(mode, name) for mode in ("native", "expandable", "captured")
            }
            found = self.batches[name]
            words = (f"{mode} {found[mode].get('batch', '?')}" for mode in found)
            print(f"{name:22s} largest batch: {', '.join(words)}", flush=True)
            summary = summarize_batches(self.batches)
            write_result("gpu_run_batches", {**summary, "jobs": self.batches})

    def largest(self, mode: str, job: str) -> dict[str, Any]:
        """The largest batch that trains, by doubling and halving, and what it did."""
        best: dict[str, Any] = {}

        def fits(batch: int) -> bool:
            nonlocal best
            plan = self.capture(job, batch) if mode == "captured" else ""
            found = self.in_mode(mode, job, plan, batch=batch, steps=BATCH_STEPS)
            if "error" in found:
                raise LookupError(found["error"])
            if "out_of_memory" not in found and batch > best.get("batch", 0):
                best = {"batch": batch, **brief(found)}
            return "out_of_memory" not in found

        try:
            largest(fits, first=8)
        except LookupError as error:
            best["error"] = str(error)
        return best


def script(out: Path, job: str, batch: int, steps: int) -> list[str]:
    """The job's words."""
    size = ["--batch", str(batch)] if batch else []
    return [str(SCRIPT), str(out), "--job", job, "--steps", str(steps), *size]


def largest(fits: Callable[[int], bool], first: int) -> int:
    """The largest number that fits, to within 3 %; 0 when not even 1 does."""
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def brief(run: dict[str, Any]) -> dict[str, Any]:
    """A run without its losses, with what is derived of it."""
    found = {key: value for key, value in run.items() if key not in ("losses", "seconds")}
    if run.get("reserved_peak_bytes"):
        found["efficiency"] = run["allocated_peak_bytes"] / run["reserved_peak_bytes"]
    if "seconds" in run:
        middle = statistics.median(run["seconds"][min(WARM_UP, len(run["seconds"]) // 2) :])
        found["step_seconds"] = middle
        found["tokens_per_second"] = run["tokens_per_step"] / middle
    return found


def paired(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Step times of the second of each pair over those of the first: the mean ratio of equal steps,
    and its 95 % interval."""
    ratios = [
        after / before
        for a, b in pairs
        for before, after in zip(
            a.get("seconds", ())[WARM_UP:], b.get("seconds", ())[WARM_UP:], strict=False
        )
    ]
    if len(ratios) < 2:
        return {"pairs": len(ratios)}
    mean = statistics.fmean(ratios)
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {"pairs": len(ratios), "ratio": mean, "low": mean - half, "high": mean + half}


def line(found: dict[str, Any]) -> str:
    """A job's outcome for a person."""
    words = []
    for mode in MODES:
        run = found["runs"][mode]
        if "efficiency" in run:
            words.append(
                f"{mode} {run['reserved_peak_bytes'] / 2**30:.2f} GiB ({run['efficiency']:.1%})"
            )
        else:
            words.append(f"{mode} failed: {str(run.get('error', run)).strip()[-100:]}")
    time_ = found["step_time"]
    words.append(f"step × {time_['ratio']:.3f}" if "ratio" in time_ else "no step times")
    return ", ".join(words)


def summarize(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask of part `steps`."""

    def runs(mode: str, names: list[str]) -> list[dict[str, Any]]:
        found = (jobs[name]["runs"][mode] for name in names)
        return [run for run in found if "efficiency" in run]

    static = [name for name in jobs if name not in ROUTED]
    routed = [name for name in jobs if name in ROUTED]
    summary: dict[str, Any] = {
        "device_name": next((run["device_name"] for run in runs("native", list(jobs))), ""),
        "jobs_done": len(runs("planned", list(jobs))),
        "same_losses": sum(all(job["same_losses"].values()) for job in jobs.values()),
        "below_expandable": sum(
            job["runs"]["planned"].get("reserved_peak_bytes", math.inf)
            < job["runs"]["expandable"].get("reserved_peak_bytes", 0)
            for job in jobs.values()
        ),
    }
    for key, names in (("static", static), ("routed", routed)):
        if runs("planned", names):
            summary[f"least_efficiency_{key}"] = min(
                run["efficiency"] for run in runs("planned", names)
            )
    times = [job["step_time"] for job in jobs.values() if "ratio" in job["step_time"]]
    if times:
        summary["widest_step_time"] = max(
            max(abs(time_["low"] - 1), abs(time_["high"] - 1)) for time_ in times
        )
    rates = [run["stats"]["hit_rate"] for run in runs("captured", list(jobs)) if "stats" in run]
    if rates:
        summary["least_captured_hit_rate"] = min(rate or 0.0 for rate in rates)
    slower = [
        job["runs"]["recorded"]["step_seconds"] / job["runs"]["native"]["step_seconds"] - 1
        for job in jobs.values()
        if all("step_seconds" in job["runs"][mode] for mode in ("recorded", "native"))
    ]
    if slower:
        summary["slowest_recording"] = max(slower)
    return summary


def summarize_batches(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask of part `batches`."""
    gains = [
        job["captured"].get("batch", 0) / job["expandable"]["batch"] - 1
        for job in jobs.values()
        if job["expandable"].get("batch")
    ]
    return {
        "jobs_done": len(gains),
        **({"least_headroom": min(gains), "most_headroom": max(gains)} if gains else {}),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = suite_parser(__doc__, BUDGET_SECONDS)
    parser.add_argument("--part", choices=("steps", "batches"), help="both when not said")
    parser.add_argument("--gpu", default="", help="the card, for captures; h100 and so on")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="native and planned, for times")
    options = parser.parse_args(arguments)

    def measure(work: Path, names: list[str]) -> int:
        suite = Suite(work, gpu=options.gpu, budget=options.budget, at_once=options.at_once)
        suite.pairs = options.pairs
        if options.part != "batches":
            suite.run_steps(names)
        if options.part != "steps":
            suite.run_batches([name for name in names if name in GROWN])
        summary = {**summarize(suite.steps), "batches": summarize_batches(suite.batches)}
        print(json.dumps(summary, indent=1))
        return 0

    commands = {name: " ".join(script(Path("-"), name, 0, STEPS)) for name in JOBS}
    return run_suite(options, commands, measure)


if __name__ == "__main__":
    sys.exit(main())
