"""`memplan estimate --whole-run` beside a complete capture, on jobs with batches of many sizes.

    python -m bench.whole_run [--only complete|whole_run|plain] [NAME …]

Of each job: the reserved peak of a whole-run estimate, of a capture of everything that the job does
(`complete`), and of a plain estimate, with the seconds of each: those of the clock, and those of
the processor, which the share is of. What an earlier run has measured is kept, but for the jobs or
the measurement that are named. Writes `bench/results/whole_run.json` after each measurement, and in
the end the table in `docs/whole-run.md`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
from typing import Any

from bench.pages import markdown_table, write_between
from bench.process import watch
from bench.results import ROOT, known_result, write_result

NAME = "whole_run"
PAGE = ROOT / "docs" / "whole-run.md"
BEGIN, END = "<!-- JOBS -->\n", "<!-- END OF JOBS -->\n"
SECONDS = 3600.0
FOLDER = "bench/whole_run_jobs"
PLAIN, IMAGES = f"{FOLDER}/sequences.py", f"{FOLDER}/images.py"
TRAINER = (
    f"{FOLDER}/trainer.py --output_dir out --report_to none --save_strategy no --num_train_epochs 1"
)

Row = dict[str, Any]

JOBS = {
    "gpt2": f"{PLAIN} --model gpt2 --batches 600",
    "gpt2_lognormal": f"{PLAIN} --model gpt2 --batches 600 --lengths lognormal --seed 1",
    "gpt2_uniform": f"{PLAIN} --model gpt2 --batches 600 --lengths uniform --seed 2",
    "gpt2_accumulates": f"{PLAIN} --gradient-accumulation-steps 4 --batches 240 --seed 3",
    "gpt2_amp_workers": f"{PLAIN} --amp --workers 2 --seed 4",
    "gpt2_long": f"{PLAIN} --longest 2000 --mean 400 --batch-size 2 --batches 200 --seed 5",
    "bert": f"{PLAIN} --model bert --batch-size 16 --seed 6",
    "bert_by_tokens": f"{PLAIN} --model bert --by-tokens 4096 --batches 200 --seed 7",
    "llama": f"{PLAIN} --model llama --seed 8",
    "llama_amp": f"{PLAIN} --model llama --amp --lengths lognormal --batches 150 --seed 9",
    "t5": f"{PLAIN} --model t5 --seed 10",
    "trainer": f"{TRAINER} --per_device_train_batch_size 32",
    "trainer_grouped": (
        f"{TRAINER} --per_device_train_batch_size 32 --train_sampling_strategy group_by_length"
    ),
    "trainer_accumulates": (
        f"{TRAINER} --per_device_train_batch_size 16 --gradient_accumulation_steps 2 --seed 1"
    ),
    "trainer_evaluates": (
        f"{TRAINER} --per_device_train_batch_size 32 --eval_strategy epoch --bf16 --seed 2 "
        "--per_device_eval_batch_size 128"
    ),
    "images": IMAGES,
    "images_more": f"{IMAGES} --batch-size 48 --seed 1",
    "summaries": f"{FOLDER}/summaries.py",
    "unfreezes": f"{FOLDER}/unfreezes.py",
    "preferences": f"{FOLDER}/preferences.py",
}
MEASUREMENTS = {
    "complete": ("--steps", str(10**6)),
    "whole_run": ("--whole-run",),
    "plain": (),
}


def estimate(job: str, *options: str) -> Row:
    """Raises RuntimeError for a job that cannot be captured."""
    words = ["estimate", "--json", "--gpu", "a100-80gb", *options, *job.split()]
    before = cpu_seconds()
    done = watch([sys.executable, "-m", "memplan", *words], cwd=ROOT, timeout=SECONDS)
    if done.code not in (0, 3):
        raise RuntimeError(done.stderr[-2000:])
    answer: Row = json.loads(done.stdout)
    return {
        "reserved_bytes": answer["reserved_peak_bytes"],
        "low_bytes": answer["reserved_low_bytes"],
        "high_bytes": answer["reserved_high_bytes"],
        "allocated_bytes": answer["allocated_peak_bytes"],
        "phases": {one["phase"]: one["allocated_peak_bytes"] for one in answer["phases"]},
        "steps": answer["steps"],
        "simulated_steps": answer["repeated_steps"],
        "seconds": round(done.seconds, 2),
        "cpu_seconds": round(cpu_seconds() - before, 2),
    }


def cpu_seconds() -> float:
    """Of all commands so far and what they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compared(row: Row) -> Row:
    truth = row["complete"]["reserved_bytes"]
    for name in ("whole_run", "plain"):
        row[f"{name}_error"] = row[name]["reserved_bytes"] / truth - 1
    row["inside"] = row["whole_run"]["low_bytes"] <= truth <= row["whole_run"]["high_bytes"]
    row["width"] = (row["whole_run"]["high_bytes"] - row["whole_run"]["low_bytes"]) / truth
    row["time_share"] = row["whole_run"]["cpu_seconds"] / row["complete"]["cpu_seconds"]
    return row


def summary(rows: dict[str, Row]) -> Row:
    errors = [row["whole_run_error"] for row in rows.values()]
    return {
        "jobs": len(rows),
        "worst_error": max(map(abs, errors)),
        "lowest_error": min(errors),
        "median_error": statistics.median(map(abs, errors)),
        "plain_lowest_error": min(row["plain_error"] for row in rows.values()),
        "inside": sum(row["inside"] for row in rows.values()),
        "widest": max(row["width"] for row in rows.values()),
        "median_time_share": statistics.median(row["time_share"] for row in rows.values()),
    }


def write_table(rows: dict[str, Row]) -> None:
    head = ("job", "steps", "every step captured", "`--whole-run`", "plain estimate", "time")
    cells = [
        (
            f"`{row['job'].removeprefix(FOLDER + '/')}`",
            str(row["complete"]["steps"]),
            f"{row['complete']['reserved_bytes'] / 2**30:.2f} GiB",
            f"{row['whole_run_error']:+.2%}",
            f"{row['plain_error']:+.1%}",
            f"{row['time_share']:.0%}",
        )
        for row in rows.values()
    ]
    table = "".join(f"{line}\n" for line in markdown_table(head, cells))
    write_between(PAGE, BEGIN, END, table)


def known() -> dict[str, Row]:
    """What earlier runs measured of the same commands."""
    data = known_result(NAME)
    return {name: data[name] for name, job in JOBS.items() if data.get(name, {}).get("job") == job}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("jobs", nargs="*", metavar="NAME", choices=[*JOBS, []])
    parser.add_argument("--only", choices=MEASUREMENTS, help="this one, anew")
    args = parser.parse_args()
    rows = known()
    for name in args.jobs or JOBS:
        row = rows.setdefault(name, {"job": JOBS[name]})
        for kind, options in MEASUREMENTS.items():
            wanted = args.only == kind or (kind not in row and not args.only)
            if wanted or (args.jobs and not args.only):
                row[kind] = estimate(JOBS[name], *options)
                print(f"{name:20s} {kind:10s} {row[kind]}", flush=True)
                write_result(NAME, {one: rows[one] for one in JOBS if one in rows})
    complete = {
        name: compared(rows[name])
        for name in JOBS
        if MEASUREMENTS.keys() <= rows.get(name, {}).keys()
    }
    if complete:
        write_table(complete)
        write_result(NAME, {"summary": summary(complete), **rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
