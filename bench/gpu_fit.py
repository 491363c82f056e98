"""Each lever of `fit` on a GPU, what is promised beside what happens: `make gpu SUITE=fit`.

    python -m bench.gpu_fit [--budget 600] [--only TEXT] [--dry-run]
    python -m bench.gpu_fit --again       # no GPU: plans and promises anew what was measured once

For each job and lever: a plan of the lever alone, the job captured with it (the promise), its steps
for real with and without it, and the bits of its weights both times (deterministic kernels).
Unattended, no network; `bench/results/gpu_fit.json` is written after every job.

A lever is a function in LEVERS: what a captured trace leads to, or None where it has nothing to do.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu_fit_steps import STEPS
from bench.gpu_jobs.jobs import JOBS
from bench.gpu_suite import (
    CUBLAS_WORKSPACE,
    NO_TIME,
    TimedSuite,
    failure,
    last_line,
    measured_once,
    run_suite,
    suite_parser,
)
from bench.results import ROOT, write_result
from memplan import __version__
from memplan.fit.frozen import frozen_bytes
from memplan.fit.loss import heads_of
from memplan.phases.step_graph import plain_peak, step_graph
from memplan.recompute.offload import Link, OffloadSearch, to_offload_part
from memplan.recompute.selection import Selection, to_part
from memplan.recompute.transfers import Judged, Saves, Schedule
from memplan.types.deadline import Deadline
from memplan.types.device import DeviceProfile, find_profile
from memplan.types.plan import FrozenPart, LossPart, Plan, StatePart, StepPart
from memplan.types.plan_file import save_plan
from memplan.types.step_graph import StepGraph
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace

SCRIPT = ROOT / "bench" / "gpu_jobs" / "train.py"
NAMES = (
    "gpt2-fp32-adamw",
    "llama1b-bf16-fused",
    "llama1b-bf16-frozen",
    "resnet50-fp32-sgd",
    "vit-ampbf16-fused",
)
BUDGET_SECONDS = 600.0
CAPTURE_SECONDS, STEP_SECONDS = 90.0, 90.0
SEARCH_SECONDS = 10.0
WINDOW_BYTES = 256 << 20
LEAST_BYTES = 1 << 20
CHUNK_ROWS = 512


def offload_all(trace: Trace, profile: DeviceProfile) -> Plan | None:
    """All that autograd saves: the link is the bound."""
    graph, link = step_graph(trace, profile), Link(profile.host_link_bytes_per_second)
    judged = _all_sent(graph, link)
    return Plan(offload=to_offload_part(graph, judged, link)) if judged else None


def _all_sent(graph: StepGraph, link: Link) -> Judged | None:
    saves = Saves(graph, link.bytes_per_second)
    sent = frozenset(value for value in saves.values if saves.bytes[value] >= LEAST_BYTES)
    if not sent:
        return None
    return Schedule(saves, Selection()).judge(sent, WINDOW_BYTES, WINDOW_BYTES)


def offload_half(trace: Trace, profile: DeviceProfile) -> Plan | None:
    """The cheapest of keeping, recomputing and offloading, half way to the peak of the latter."""
    graph, link = step_graph(trace, profile), Link(profile.host_link_bytes_per_second)
    least = _all_sent(graph, link)
    if least is None:
        return None
    budget = (plain_peak(graph) + least.peak_bytes) // 2
    best = OffloadSearch(graph, link, Deadline(SEARCH_SECONDS)).within(budget)
    if best is None:
        return None
    recompute = to_part(
        graph,
        best.plan.selection,
        budget_bytes=budget,
        peak_bytes=best.peak_bytes,
        added_seconds=best.replay_seconds,
    )
    return Plan(recompute=recompute, offload=to_offload_part(graph, best, link))


def state_on_host(_trace: Trace, _profile: DeviceProfile) -> Plan:
    return Plan(state=StatePart(share=1.0))


def frozen_on_host(trace: Trace, _profile: DeviceProfile) -> Plan | None:
    """All of them: the link is the bound."""
    sizes = frozen_bytes(trace)
    return Plan(frozen=FrozenPart(share=1.0, ahead_bytes=2 * max(sizes))) if sizes else None


def step_in_buckets(_trace: Trace, _profile: DeviceProfile) -> Plan:
    return Plan(step=StepPart())


def loss_in_chunks(trace: Trace, _profile: DeviceProfile) -> Plan | None:
    heads = heads_of(trace)
    return Plan(loss=LossPart(heads=heads, rows=CHUNK_ROWS)) if heads else None


LEVERS: dict[str, Callable[[Trace, DeviceProfile], Plan | None]] = {
    "offload-all": offload_all,
    "offload-half": offload_half,
    "state": state_on_host,
    "frozen": frozen_on_host,
    "step": step_in_buckets,
    "loss": loss_in_chunks,
}


@dataclass
class Suite(TimedSuite):
    """One run of the suite, and what it has found so far."""

    budget: float = BUDGET_SECONDS
    gpu: str = ""
    """As `memplan estimate --gpu` takes it; empty: the card of this machine."""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured_on: dict[str, Any] | None = None
    """Where and when, if not here and now."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What is known, by job and lever: it is not measured again."""

    def run_job(self, name: str) -> None:
        """The job plainly, then under each lever."""
        words = words_of(name)
        trace = self.work / f"{name}.trace"
        found = self.jobs.setdefault(name, {})
        found["plain"] = self.try_plan(f"{name}-plain", Plan(), words, trace)
        self.tell(f"{name} plain", found["plain"])
        if not trace.exists():
            return
        captured = load_trace(trace)
        profile = find_profile(captured.meta.gpu)
        for lever, make in LEVERS.items():
            if self.measured and f"{name}-{lever}" not in self.measured:
                continue
            plan = make(captured, profile)
            if plan is not None:
                found[lever] = self.try_plan(f"{name}-{lever}", plan, words, None)
                self.tell(f"{name} {lever}", found[lever])

    def try_plan(self, name: str, plan: Plan, words: list[str], trace: Path | None) -> Any:
        """`promised` and `measured`, each with `error` where it failed."""
        path = self.work / f"{name}.plan"
        save_plan(msgspec.structs.replace(plan, memplan_version=__version__), path)
        parts = [
            getattr(plan, part) for part in ("recompute", "offload", "state", "frozen", "loss")
        ]
        added = sum(getattr(part, "added_seconds", 0.0) for part in parts)
        with ThreadPoolExecutor() as pool:
            promised = pool.submit(self.estimate, path, words, trace)
            known = self.measured.get(name)
            measured = self.steps(path, words) if known is None else known
            return {"added_seconds": added, "promised": promised.result(), "measured": measured}

    def estimate(self, plan: Path, words: list[str], trace: Path | None) -> dict[str, Any]:
        command = [sys.executable, "-m", "memplan", "estimate", "--json", "--plan", str(plan)]
        command += ["--gpu", self.gpu] if self.gpu else []
        command += ["-o", str(trace)] if trace is not None else []
        with self.host:
            seconds = self.time_for(CAPTURE_SECONDS)
            if not seconds:
                return {"error": NO_TIME}
            environment = {**os.environ, **CUBLAS_WORKSPACE, "CUDA_VISIBLE_DEVICES": ""}
            code, stdout, stderr = self.run([*command, *words], environment, seconds)
        if code not in (0, 3):
            return {"error": failure(code, stderr)}
        answer = json.loads(stdout)
        self.gpu = self.gpu or answer.get("gpu", {}).get("name", "")
        return {name: answer[name] for name in ("allocated_peak_bytes", "host_peak_bytes", "notes")}

    def steps(self, plan: Path, words: list[str]) -> dict[str, Any]:
        out = plan.with_suffix(".json")
        command = [sys.executable, "-m", "bench.gpu_fit_steps", str(out), str(plan)]
        return self.ask([*command, *words], out, STEP_SECONDS, CUBLAS_WORKSPACE)

    def tell(self, name: str, found: dict[str, Any]) -> None:
        print(f"{name:36s} {line(found)}", flush=True)

    def save(self) -> None:
        on = {} if self.measured_on is None else {"measured_on": self.measured_on}
        write_result("gpu_fit", {"gpu": self.gpu, **summarize(self.jobs), **on, "jobs": self.jobs})


def line(found: dict[str, Any]) -> str:
    """For a person."""
    promised, measured = found["promised"], found["measured"]
    if "error" in promised or "error" in measured:
        return last_line(promised.get("error") or measured.get("error"))
    return (
        f"peak {measured['allocated_peak_bytes'] / 2**30:.2f} GiB "
        f"(promised {promised['allocated_peak_bytes'] / 2**30:.2f}), "
        f"step {1e3 * measured['seconds']:.1f} ms"
    )


def summarize(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of every lever that was captured and run: the worst error of its peak, and the time that it
    added beside what was promised; whether the weights have the bits of the plain run."""
    rows = []
    for name, levers in jobs.items():
        plain = levers["plain"]
        for lever, found in levers.items():
            promised, measured = found["promised"], found["measured"]
            if "error" in promised or "error" in measured or "error" in plain["measured"]:
                continue
            exact, bits = (one["measured"]["weights"] for one in (plain, found))
            rows.append(
                {
                    "job": name,
                    "lever": lever,
                    "peak_error": promised["allocated_peak_bytes"]
                    / measured["allocated_peak_bytes"]
                    - 1,
                    "added_seconds": measured["seconds"] - plain["measured"]["seconds"],
                    "promised_seconds": found["added_seconds"],
                    "same_bits": exact == bits,
                }
            )
    worst = max((abs(row["peak_error"]) for row in rows), default=None)
    return {"levers": rows, "worst_peak_error": worst}


def words_of(name: str) -> list[str]:
    """The job's script and its arguments."""
    return [str(SCRIPT), *shlex.split(JOBS[name]), "--steps", str(STEPS), "--deterministic"]


def again(work: Path, names: list[str]) -> int:
    """Plan and promise anew what was measured. Needs no GPU."""
    before = measured_once("gpu_fit")
    if before is None:
        return 2
    data, on = before
    suite = Suite(work, budget=math.inf, gpu=data["gpu"], jobs=data["jobs"], measured_on=on)
    for name, levers in suite.jobs.items():
        for lever, found in levers.items():
            if "error" not in found["measured"]:
                suite.measured[f"{name}-{lever}"] = found["measured"]
    suite.each([name for name in names if name in data["jobs"]], suite.run_job, suite.save)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = suite_parser(__doc__, BUDGET_SECONDS)
    parser.add_argument("--gpu", default="", help="the card, as memplan estimate takes it")
    options = parser.parse_args(arguments)

    def measure(work: Path, names: list[str]) -> int:
        suite = Suite(work, budget=options.budget, gpu=options.gpu, at_once=options.at_once)
        suite.each(names, suite.run_job, suite.save)
        rows = summarize(suite.jobs)["levers"]
        return 0 if len(rows) >= len(names) * 2 else 1

    commands = {
        name: f"{name}: {SCRIPT} {JOBS[name]}; levers {', '.join(LEVERS)}" for name in NAMES
    }
    return run_suite(options, commands, measure, again)


if __name__ == "__main__":
    sys.exit(main())
