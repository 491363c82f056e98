"""`memplan fit` on jobs that do not fit their card, as a user would type it, and one for real.

For each: wall seconds of the whole process tree, what it found, and what it promises. The small job
is also run on the CPU, with its plan and without: measured peak against promise, and the losses.
Writes `bench/results/fit.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.process import watch
from bench.results import ROOT, write_result

# Card and script with its arguments.
JOBS = {
    "gpt2_medium": (
        "8GiB",
        "examples/gpt2/train.py --layers 24 --heads 16 --width 1024 --batch-size 4",
    ),
    "resnet152": (
        "12GiB",
        "examples/resnet50/train.py --arch resnet152 --batch-size 256 --train-images 1024",
    ),
    "llama_1b": (
        "12GiB",
        "bench/gpu_jobs/train.py --model llama --batch 4 --length 1024 --precision bf16"
        " --optimizer adamw-fused",
    ),
}
SMALL = ("940MiB", "bench/fit_jobs/mlp.py")


def memplan(*words: str, measure: bool = False) -> tuple[str, float]:
    """stdout and wall seconds. Raises RuntimeError when it says neither yes nor no."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if measure:
        environment["MEASURE"] = "1"
    command = [sys.executable, "-m", "memplan", *words]
    done = watch(command, cwd=ROOT, env=environment, timeout=900.0)
    if done.code not in (0, 3):
        raise RuntimeError(f"{' '.join(words)}: exit code {done.code}\n{done.stderr[-2000:]}")
    return done.stdout, done.seconds


def fit(card: str, job: str, plan: Path) -> dict[str, Any]:
    """What `memplan fit` says of a job."""
    out, seconds = memplan("fit", "--json", "--gpu", card, "-o", str(plan), *job.split())
    answer = json.loads(out)
    after = answer["after"] or answer["before"]
    return {
        "gpu": card,
        "job": job,
        "seconds": round(seconds, 2),
        "captures": len(answer["attempts"]) + 1,
        "fits": answer["fits"],
        "card_bytes": answer["gpu"]["total_bytes"],
        "plain_high_bytes": answer["before"]["high_bytes"],
        "peak_bytes": after["peak_bytes"],
        "high_bytes": after["high_bytes"],
        "added_fraction": answer["added_fraction"],
        "alloc_conf": after["alloc_conf"],
    }


def for_real(folder: Path) -> dict[str, Any]:
    """The small job fitted, then run on the CPU with the plan and without."""
    card, job = SMALL
    plan = folder / "small.plan"
    result = fit(card, job, plan)
    promised = json.loads(plan.read_text(encoding="utf-8"))["recompute"]["peak_bytes"]
    runs = [
        memplan("run", *words, *job.split(), "--device", "cpu", measure=True)[0].splitlines()
        for words in ([], ["--plan", str(plan)])
    ]
    losses = [[line for line in lines if line.startswith("loss ")] for lines in runs]
    measured = [int(lines[-1].removeprefix("peak ")) for lines in runs]
    return {
        **result,
        "promised_bytes": promised,
        "measured_plain_bytes": measured[0],
        "measured_bytes": measured[1],
        "losses": len(losses[0]),
        "losses_different": sum(a != b for a, b in zip(*losses, strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", choices=[[], *JOBS, "for_real"], help="default: all")
    options = parser.parse_args()
    names = options.jobs or [*JOBS, "for_real"]
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                if name == "for_real":
                    results[name] = for_real(Path(folder))
                else:
                    results[name] = fit(*JOBS[name], Path(folder) / f"{name}.plan")
            except RuntimeError as error:
                print(error, file=sys.stderr)
                continue
            found = results[name]
            print(
                f"{name:12s} {found['seconds']:6.1f} s  fits {found['fits']}  "
                f"+{found['added_fraction']:.1%} time, {found['captures']} captures",
                flush=True,
            )
    if not options.jobs and len(results) == len(names):
        print(write_result("fit", results))
    return 0 if len(results) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
