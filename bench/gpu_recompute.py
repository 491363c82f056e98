"""Recomputation on a GPU: what is promised beside what happens: `make gpu SUITE=recompute`.

    python -m bench.gpu_recompute [--budget 450] [--only TEXT] [--dry-run]

For each of four networks: the plain step, per-block checkpointing and our least peak; then plans
for budgets between the least and the plain peak, one for the peak of per-block checkpointing, and
PyTorch's own memory budget. Each is a process of its own; several plan at once, one is measured at
a time. Unattended, no network; what fails or finds no time is told in
`bench/results/gpu_recompute.json`, which is written after every process.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import gpu_turns
from bench.gpu_suite import CUBLAS_WORKSPACE, TimedSuite, last_line, run_suite, suite_parser
from bench.results import write_result

JOBS = ("gpt2-medium", "llama-1b", "resnet-50", "u-net")
BUDGETS = (0.15, 0.35, 0.55, 0.75)
"""Between the least peak (0) and the plain one (1)."""
FRACTIONS = (0.5, 1.0)
"""Of PyTorch's budget; 1 is the plain compiled step."""
BUDGET_SECONDS = 450.0
TASK_SECONDS = 180.0
AT_ONCE = 6


@dataclass(frozen=True)
class Task:
    """One process."""

    job: str
    kind: str
    """`reference`, `point`, `equal` or `pytorch`: where in the job's results it goes."""
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return "-".join((self.job, self.kind, *(a for a in self.arguments[1:] if a[:2] != "--")))


@dataclass
class Suite(TimedSuite):
    """One run of the suite, and what it has found so far."""

    budget: float = BUDGET_SECONDS
    at_once: int = AT_ONCE
    """Each is alone on the card while it is timed."""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def command(self, task: Task, out: Path) -> list[str]:
        return [
            sys.executable, "-m", "bench.gpu_recompute_jobs.measure", str(out), *task.arguments,
            "--job", task.job,
        ]  # fmt: skip

    def perform(self, task: Task) -> dict[str, Any]:
        """What the task's process found, or `error`."""
        out = self.work / f"{task.name}.json"
        turns = os.environ.get(gpu_turns.FOLDER, str(self.work))
        environment = {**CUBLAS_WORKSPACE, gpu_turns.FOLDER: turns}
        return self.ask(self.command(task, out), out, TASK_SECONDS, environment)

    def run_all(self, names: list[str]) -> None:
        """References first, what they make possible next; saved after every task."""
        self.jobs = {name: {"points": [], "pytorch": []} for name in names}
        with ThreadPoolExecutor(self.at_once) as pool:
            pending: dict[Future[dict[str, Any]], Task] = {}

            def submit(tasks: list[Task]) -> None:
                pending.update({pool.submit(self.perform, task): task for task in tasks})

            submit([Task(name, "reference", ("reference",)) for name in names])
            submit([compiled(name, FRACTIONS[0]) for name in names])
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    task = pending.pop(future)
                    submit(self.finish(task, future.result()))
                    self.save()

    def finish(self, task: Task, found: dict[str, Any]) -> list[Task]:
        """Note what a task found and print its line; the tasks that follow from it."""
        job = self.jobs[task.job]
        if task.kind in ("point", "pytorch"):
            job["points" if task.kind == "point" else "pytorch"].append(found)
        else:
            job[task.kind] = found
        print(f"{task.name:40s} {line(found)}", flush=True)
        if task.kind != "reference" or "error" in found:
            return []
        rest = [compiled(task.job, fraction) for fraction in FRACTIONS[1:]]
        return [*planned(task.job, found), *rest]

    def save(self) -> None:
        write_result("gpu_recompute", {**summarize(self.jobs), "jobs": self.jobs})


def planned(job: str, reference: dict[str, Any]) -> list[Task]:
    """The budgets that a job's reference leads to."""
    promised = reference["least"]["promised"]
    least, plain = promised["peak_bytes"], promised["plain_peak_bytes"]
    equal = reference["per_block"]["peak_bytes"]
    return [
        Task(job, "equal", ("budget", "--per-block", "--bytes", str(equal))),
        *(
            Task(job, "point", ("budget", "--bytes", str(int(least + share * (plain - least)))))
            for share in BUDGETS
        ),
    ]


def compiled(job: str, fraction: float) -> Task:
    """PyTorch's budget at one setting."""
    return Task(job, "pytorch", ("pytorch", "--fraction", str(fraction)))


def line(found: dict[str, Any]) -> str:
    """A task's outcome for a person."""
    if "error" in found:
        return last_line(found["error"])
    step = found.get("planned") or found.get("plain") or found
    text = f"peak {step['peak_bytes'] / 2**30:.2f} GiB, step {1e3 * step['seconds']:.1f} ms"
    if "budget_bytes" in found:
        text += (
            f", budget {found['budget_bytes'] / 2**30:.2f} GiB, added "
            f"{found['added_fraction']:+.1%} (promised "
            f"{found['promised']['added_fraction']:+.1%}), "
            f"{'same bits' if found['identical'] else 'OTHER BITS'}"
        )
    return text


def summarize(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask of all that was measured."""
    points = [point for job in jobs.values() for point in job["points"] if "error" not in point]
    all_plans = points + [
        job["equal"] for job in jobs.values() if "budget_bytes" in job.get("equal", {})
    ]
    summary: dict[str, Any] = {
        "device_name": next(
            (job["reference"]["device_name"] for job in jobs.values()
             if "device_name" in job.get("reference", {})), "",
        ),
        "job_count": sum("plain" in job.get("reference", {}) for job in jobs.values()),
        "points_wanted": len(BUDGETS) * len(jobs),
        "points": len(points),
        "points_within_budget": sum(
            point["planned"]["peak_bytes"] <= point["budget_bytes"] for point in points
        ),
        "plans": len(all_plans),
        "plans_identical": sum(plan["identical"] for plan in all_plans),
        "pytorch_failed": sorted(
            name for name, job in jobs.items() if any("error" in one for one in job["pytorch"])
        ),
    }  # fmt: skip
    if points:
        summary["worst_added_error"] = max(
            abs(point["added_fraction"] - point["promised"]["added_fraction"]) for point in points
        )
        summary["worst_peak_error"] = max(
            abs(point["planned"]["peak_bytes"] / point["promised"]["peak_bytes"] - 1)
            for point in points
        )
    faster = [
        1 - job["equal"]["planned"]["seconds"] / job["equal"]["per_block"]["seconds"]
        for job in jobs.values()
        if "per_block" in job.get("equal", {})
        and job["equal"]["planned"]["peak_bytes"] <= job["equal"]["per_block"]["peak_bytes"]
    ]
    summary["faster_count"] = len(faster)
    if faster:
        summary["least_faster_than_per_block"] = min(faster)
    return summary


def main(arguments: list[str] | None = None) -> int:
    options = suite_parser(__doc__, BUDGET_SECONDS).parse_args(arguments)

    def measure(work: Path, names: list[str]) -> int:
        suite = Suite(work, budget=options.budget)
        suite.run_all(names)
        summary = summarize(suite.jobs)
        print(json.dumps(summary, indent=1))
        return 0 if summary["points"] == summary["points_wanted"] else 1

    commands = {
        name: " ".join(Suite(Path()).command(Task(name, "reference", ("reference",)), Path("-")))
        for name in JOBS
    }
    return run_suite(options, commands, measure)


if __name__ == "__main__":
    sys.exit(main())
