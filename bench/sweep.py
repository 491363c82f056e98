"""A sweep of 48 combinations of a model of 1.0 B parameters (GPT-2's, 24 layers of width 1792) on
two cores: wall time, CPU time, and what was captured. Writes `bench/results/sweep.json`.

The wall time counts on a machine that does nothing else; the CPU time of a core is the least that
it can be, and `load_before` tells of others.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

from bench.results import ROOT, write_result

CORES = 2
_VARIED = (
    *("--gpu", "h100,a100-80gb", "--vary", "batch-size=1,2,4,8"),
    *("--vary", "precision=fp32,fp16,bf16", "--vary", "context=512,1024"),
)
_JOB = ("examples/gpt2/train.py", "--layers", "24", "--width", "1792", "--heads", "28")


def main() -> None:
    """Measure once."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    words = [sys.executable, "-m", "memplan", "sweep", "--json", *_VARIED, *_JOB]
    began, before = time.monotonic(), os.getloadavg()[0]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    wall = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads(done.stdout)
    statuses = [row["status"] for row in answer["rows"]]
    data = {
        "combinations": len(statuses),
        "captures": answer["captures"],
        "statuses": {name: statuses.count(name) for name in sorted(set(statuses))},
        "wall_seconds": wall,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "cpu_seconds_a_core": (used.ru_utime + used.ru_stime) / CORES,
        "load_before": before,
        "ranked_by": answer["ranked_by"],
        "best": answer["rows"][0]["values"],
    }
    print(json.dumps(data, indent=2))
    write_result("sweep", data)


if __name__ == "__main__":
    main()
