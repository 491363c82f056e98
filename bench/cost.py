"""What an answer costs: `memplan estimate` on every example, as a user would type it.

Wall seconds (median of the runs) and the peak resident memory (worst of the runs) of the whole
process tree, start-up and imports included. Writes `bench/results/cost.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from bench.process import watch
from bench.results import ROOT, write_result

RUNS = 3
# One card per example on which it is meant to run.
GPUS = {
    "gpt2": "rtx4090",
    "resnet50": "rtx4090",
    "hf_trainer": "rtx4090",
    "lora": "rtx4090",
    "moe": "rtx4090",
    "llama3_8b": "h100",
    "llama3_70b_fsdp": "h100",
}
# What is captured of a job of many processes: one of them.
PLACES = {"llama3_70b_fsdp": ["--world-size", "64", "--rank", "0"]}


def measure(example: str, runs: int) -> dict[str, Any]:
    """Seconds, memory and the answer of one example. Raises RuntimeError when it gives none."""
    command = [
        sys.executable, "-m", "memplan", "estimate", "--json",
        "--gpu", GPUS[example], *PLACES.get(example, ()), f"examples/{example}/train.py",
    ]  # fmt: skip
    done = [watch(command, cwd=ROOT) for _ in range(runs)]
    last = done[-1]
    if any(run.code not in (0, 3) for run in done):
        raise RuntimeError(f"{example}: exit code {last.code}\n{last.stderr[-2000:]}")
    answer = json.loads(last.stdout)
    return {
        "seconds": round(statistics.median(run.seconds for run in done), 3),
        "seconds_each": [round(run.seconds, 3) for run in done],
        "peak_rss_bytes": max(run.peak_rss_bytes for run in done),
        "gpu": GPUS[example],
        "peak_bytes": answer["peak_bytes"],
        "fits": answer["fits"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", nargs="*", choices=[[], *GPUS], help="default: all")
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    names = options.examples or list(GPUS)
    costs: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            costs[name] = measure(name, options.runs)
        except RuntimeError as error:
            print(f"{error}", file=sys.stderr)
            continue
        cost = costs[name]
        gib = cost["peak_rss_bytes"] / 2**30
        print(f"{name:10s} {cost['seconds']:6.2f} s  {gib:5.2f} GiB resident", flush=True)
    if set(names) == set(GPUS) and costs:
        worst = max(cost["peak_rss_bytes"] for cost in costs.values())
        counts = {"examples_measured": len(costs), "worst_peak_rss_bytes": worst}
        print(write_result("cost", {"runs": options.runs, **counts, **costs}))
    return 0 if len(costs) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
