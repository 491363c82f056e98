"""Whether a sweep's first choice is the true one: `python -m bench.ranking`.

llm-foundry's table of benchmarks measured several configurations of the same model on the same
cards: numbers of GPUs from 8 to 64, each with its micro-batch and accumulation. Which of them costs
least for a token? memplan ranks those of each model by its own step times, and what its first
choice really cost is compared with the cheapest that was measured.

What was known: all of them ran, so whether they fit is not asked (`bench/time_jobs/mpt.py` stands
in for the table's code in time, not in memory: its loss keeps logits in float32). Rows that cards
were calibrated on (`published.csv`) are left out; efficiencies are those that `bench.step_time`
checks, with the attention kernels of 2023. Rows that are not captured yet
(`python -m bench.time_jobs.rows`) are left out and counted.

Writes `bench/results/ranking.json`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import combinations
from typing import Any, NamedTuple

from bench.results import write_result
from bench.time_jobs.calibrate import of_2023
from bench.time_jobs.rows import SOURCES, Published, published, trace_path
from memplan.timing.step import step_time
from memplan.timing.table import kernel_times
from memplan.types.device import find_profile
from memplan.types.trace_file import load_trace

APART = 0.05
"""Two configurations whose measured costs differ by more have a true order."""


class Choice(NamedTuple):
    """A configuration: what was measured of it, and what memplan says."""

    job: Published
    estimated: float
    """Tokens a second of one GPU."""


def groups() -> dict[tuple[str, ...], list[Published]]:
    """Configurations of one model, length and card, where there are several."""
    found: dict[tuple[str, ...], list[Published]] = defaultdict(list)
    for job in published():
        if not job.calibrates:
            way = "recomputed" if job.checkpoint else "kept"
            found[job.source, job.gpu, job.size, str(job.seq_len), way].append(job)
    return {key: jobs for key, jobs in found.items() if len(jobs) > 1}


def choice(job: Published) -> Choice:
    trace, card = load_trace(trace_path(job)), find_profile(job.gpu)
    step = step_time(trace, card, of_2023(kernel_times()))
    assert step is not None
    return Choice(job, job.tokens_per_second * job.step_seconds / step.seconds)


def ranked(choices: list[Choice]) -> dict[str, Any]:
    """What the first choice costs beyond the cheapest, and how many pairs are in their order."""
    best = max(one.job.tokens_per_second for one in choices)
    chosen = max(choices, key=lambda one: one.estimated)
    pairs = [
        (a.job.tokens_per_second - b.job.tokens_per_second) * (a.estimated - b.estimated) > 0
        for a, b in combinations(choices, 2)
        if abs(a.job.tokens_per_second / b.job.tokens_per_second - 1) > APART
    ]
    worst = min(one.job.tokens_per_second for one in choices)
    return {
        "chosen": chosen.job.key,
        "beyond_cheapest": round(best / chosen.job.tokens_per_second - 1, 4),
        "dearest_beyond_cheapest": round(best / worst - 1, 4),
        "pairs_apart": len(pairs),
        "pairs_in_order": sum(pairs),
        "rows": {
            one.job.key: [one.job.tokens_per_second, round(one.estimated, 1)] for one in choices
        },
    }


def main() -> int:
    found: dict[str, Any] = {}
    missing = 0
    for (source, gpu, size, length, way), jobs in groups().items():
        there = [job for job in jobs if trace_path(job).exists()]
        missing += len(jobs) - len(there)
        if len(there) > 1:
            row = ranked([choice(job) for job in there])
            found[f"{size}-{gpu}-{length}-{way}"] = {"source": SOURCES[source], **row}
            print(f"{size}-{gpu}-{length}-{way}: {row}", flush=True)
    if not found:
        print("no traces: run `python -m bench.time_jobs.rows` first", file=sys.stderr)
        return 2
    pairs = sum(row["pairs_apart"] for row in found.values())
    data = {
        "groups": len(found),
        "not_captured": missing,
        "worst_beyond_cheapest": max(row["beyond_cheapest"] for row in found.values()),
        "pairs_apart": pairs,
        "pairs_in_order": sum(row["pairs_in_order"] for row in found.values()),
        "by_model": found,
    }
    print(write_result("ranking", data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
