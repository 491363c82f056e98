"""Compiled steps on a GPU beside plain ones: `make gpu SUITE=order`.

    python -m bench.gpu_order [--budget 450] [--only TEXT] [--dry-run]

For each of four networks and several optimizers: `max_memory_allocated` and the time of a step,
plain and by `memplan.compile` in turns, and whether losses, weights and optimizer state are the
same bits; the same with fused kernels, beside plain `torch.compile`; and one plan within a budget
for each network. A process each, one at a time; unattended,
no network; what fails or finds no time is told in `bench/results/gpu_order.json`, which is written
after every process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu_suite import CUBLAS_WORKSPACE, TimedSuite, last_line, run_suite, suite_parser
from bench.results import write_result

JOBS = ("gpt2-medium", "llama-1b", "resnet-50", "u-net")
OPTIMIZERS = ("adam", "adamw-fused")
BUDGET_PART = 0.8
"""Of what the ordered step holds at its peak beyond weights, optimizer state and inputs."""
BUDGET_SECONDS = 540.0
TASK_SECONDS = 180.0


@dataclass(frozen=True)
class Task:
    """One process."""

    job: str
    optimizer: str = "adam"
    budget_bytes: int | None = None
    codegen: str = "eager"

    @property
    def name(self) -> str:
        kernels = "-inductor" if self.codegen == "inductor" else ""
        return f"{self.job}-{self.optimizer}{kernels}{'-budget' if self.budget_bytes else ''}"

    def command(self, out: Path) -> list[str]:
        budget = ["--budget-bytes", str(self.budget_bytes)] if self.budget_bytes else []
        return [
            sys.executable, "-m", "bench.gpu_order_jobs.measure", str(out),
            "--job", self.job, "--optimizer", self.optimizer, "--codegen", self.codegen, *budget,
        ]  # fmt: skip


@dataclass
class Suite(TimedSuite):
    """One run of the suite, and what it has found so far."""

    budget: float = BUDGET_SECONDS
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def perform(self, task: Task) -> dict[str, Any]:
        """What the task's process found, or `error`."""
        out = self.work / f"{task.name}.json"
        return self.ask(task.command(out), out, TASK_SECONDS, CUBLAS_WORKSPACE)

    def run_all(self, names: list[str]) -> None:
        """Each network with each optimizer, in fused kernels and within a budget; saved after every
        task."""
        tasks = [Task(name, optimizer) for optimizer in OPTIMIZERS for name in names]
        tasks[len(names) : len(names)] = [Task(name, codegen="inductor") for name in names]
        named = {task.name: task for task in tasks}

        def job(name: str) -> None:
            task = named[name]
            self._note(task)
            if task == Task(task.job) and "error" not in self.found[name]:
                self._note(Task(task.job, budget_bytes=budget_for(self.found[name])))

        self.each(named, job, self.save)

    def _note(self, task: Task) -> None:
        found = self.perform(task)
        self.found[task.name] = found
        print(f"{task.name:28s} {line(found)}", flush=True)

    def save(self) -> None:
        write_result("gpu_order", {**summarize(self.found), "tasks": self.found})


def budget_for(found: dict[str, Any]) -> int:
    """A budget that takes some recomputation, for a job that has been measured."""
    resident, promised = found["resident_bytes"], found["compiled"]["promised_bytes"]
    return int(resident + BUDGET_PART * (promised - resident))


def line(found: dict[str, Any]) -> str:
    """A task's outcome for a person."""
    if "error" in found:
        return last_line(found["error"])
    plain, compiled = found["plain"], found["compiled"]
    bits = "same bits" if found["identical"] else "OTHER BITS"
    if found["codegen"] == "inductor":
        bits = f"losses differ by {found['loss_difference']:.1e}"
    return (
        f"peak {plain['peak_bytes'] / 2**30:.2f} -> {compiled['peak_bytes'] / 2**30:.2f} GiB, "
        f"step {1e3 * plain['seconds']:.1f} -> {1e3 * compiled['seconds']:.1f} ms "
        f"({found['added_fraction']:+.1%}), {bits}"
    )


def summarize(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask of all that was measured."""
    done = {name: one for name, one in found.items() if "error" not in one}
    fused = [one for one in done.values() if one["codegen"] == "inductor"]
    exact = [one for one in done.values() if one["codegen"] == "eager"]
    ordered = [one for one in exact if one["budget_bytes"] is None]
    limited = [one for one in exact if one["budget_bytes"] is not None]
    summary: dict[str, Any] = {
        "device_name": next((one["device_name"] for one in done.values()), ""),
        "jobs": len(ordered),
        "failed": sorted(found.keys() - done.keys()),
        "identical": sum(one["identical"] for one in exact),
        "exact": len(exact),
        "tasks_done": len(done),
        "not_above_plain": sum(_ratio(one) <= 1 for one in ordered),
        "budgets": len(limited),
        "fused": len(fused),
        "fused_not_above_plain": sum(_ratio(one) <= 1 for one in fused),
    }
    if fused:
        summary["fused_slowest_added"] = max(one["added_fraction"] for one in fused)
        summary["fused_most_saved"] = max(1 - _ratio(one) for one in fused)
    if ordered:
        summary["slowest_added"] = max(one["added_fraction"] for one in ordered)
        summary["most_saved"] = max(1 - _ratio(one) for one in ordered)
    return summary


def _ratio(found: dict[str, Any]) -> float:
    """The compiled step's peak, as a part of the plain one's."""
    compiled, plain = found["compiled"]["peak_bytes"], found["plain"]["peak_bytes"]
    return float(compiled / plain)


def main(arguments: list[str] | None = None) -> int:
    options = suite_parser(__doc__, BUDGET_SECONDS).parse_args(arguments)

    def measure(work: Path, names: list[str]) -> int:
        suite = Suite(work, budget=options.budget, at_once=options.at_once)
        suite.run_all(names)
        summary = summarize(suite.found)
        print(json.dumps(summary, indent=1))
        return 0 if not summary["failed"] else 1

    commands = {name: " ".join(Task(name).command(Path("-"))) for name in JOBS}
    return run_suite(options, commands, measure)


if __name__ == "__main__":
    sys.exit(main())
