"""`memplan estimate --whole-run` beside a complete capture, on jobs with batches of many sizes.

    python -m bench.whole_run [NAME …]      all, or the named ones only, merged into the result

Of each job: the reserved peak of a whole-run estimate, of a capture of every step (`--steps`), and
of a plain estimate, with the seconds of each. Writes `bench/results/whole_run.json` and the table
in `docs/whole-run.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.process import watch
from bench.results import RESULTS, ROOT, write_result

PAGE = ROOT / "docs" / "whole-run.md"
BEGIN, END = "<!-- JOBS -->\n", "<!-- END OF JOBS -->\n"
SECONDS = 1800.0
PLAIN, TRAINER, IMAGES = (
    f"bench/whole_run_jobs/{name}.py" for name in ("sequences", "trainer", "images")
)
TO_TRAINER = "--output_dir out --report_to none --save_strategy no --num_train_epochs 1"

Row = dict[str, Any]


class Job(NamedTuple):
    script: str
    words: str
    steps: int
    """Of an epoch."""


JOBS = {
    "gpt2": Job(PLAIN, "--model gpt2", 80),
    "gpt2_lognormal": Job(PLAIN, "--model gpt2 --lengths lognormal --seed 1", 80),
    "gpt2_uniform": Job(PLAIN, "--model gpt2 --lengths uniform --seed 2", 80),
    "gpt2_accumulates": Job(PLAIN, "--gradient-accumulation-steps 4 --batches 160 --seed 3", 40),
    "gpt2_amp_workers": Job(PLAIN, "--amp --workers 2 --seed 4", 80),
    "gpt2_long": Job(PLAIN, "--longest 2000 --mean 400 --batch-size 2 --batches 120 --seed 5", 120),
    "bert": Job(PLAIN, "--model bert --batch-size 16 --seed 6", 80),
    "bert_by_tokens": Job(PLAIN, "--model bert --by-tokens 4096 --batches 160 --seed 7", 0),
    "llama": Job(PLAIN, "--model llama --seed 8", 80),
    "llama_amp": Job(PLAIN, "--model llama --amp --lengths lognormal --seed 9", 80),
    "t5": Job(PLAIN, "--model t5 --seed 10", 80),
    "trainer": Job(TRAINER, f"{TO_TRAINER} --per_device_train_batch_size 32", 60),
    "trainer_grouped": Job(
        TRAINER,
        f"{TO_TRAINER} --per_device_train_batch_size 32 --train_sampling_strategy group_by_length",
        60,
    ),
    "trainer_accumulates": Job(
        TRAINER,
        f"{TO_TRAINER} --per_device_train_batch_size 16 --gradient_accumulation_steps 2 --seed 1",
        60,
    ),
    "trainer_evaluates": Job(
        TRAINER,
        f"{TO_TRAINER} --per_device_train_batch_size 32 --eval_strategy epoch --bf16 --seed 2",
        60,
    ),
    "images": Job(IMAGES, "", 80),
    "images_more": Job(IMAGES, "--batch-size 48 --batches 120 --seed 1", 120),
}


def estimate(job: Job, *options: str) -> Row:
    """Raises RuntimeError for a job that cannot be captured."""
    words = ["estimate", "--json", "--gpu", "a100-80gb", *options, job.script, *job.words.split()]
    done = watch([sys.executable, "-m", "memplan", *words], cwd=ROOT, timeout=SECONDS)
    if done.code not in (0, 3):
        raise RuntimeError(done.stderr[-2000:])
    answer: Row = json.loads(done.stdout)
    return {
        "reserved_bytes": answer["reserved_peak_bytes"],
        "low_bytes": answer["reserved_low_bytes"],
        "high_bytes": answer["reserved_high_bytes"],
        "allocated_bytes": answer["allocated_peak_bytes"],
        "steps": answer["steps"],
        "simulated_steps": answer["repeated_steps"],
        "seconds": round(done.seconds, 2),
    }


def compare(job: Job) -> Row:
    row: Row = {"command": f"{job.script} {job.words}".strip()}
    row["whole_run"] = estimate(job, "--whole-run")
    row["complete"] = estimate(job, "--steps", str(job.steps or 10_000))
    row["plain"] = estimate(job)
    truth = row["complete"]["reserved_bytes"]
    for name in ("whole_run", "plain"):
        row[f"{name}_error"] = row[name]["reserved_bytes"] / truth - 1
    row["inside"] = row["whole_run"]["low_bytes"] <= truth <= row["whole_run"]["high_bytes"]
    row["width"] = (row["whole_run"]["high_bytes"] - row["whole_run"]["low_bytes"]) / truth
    row["time_share"] = row["whole_run"]["seconds"] / row["complete"]["seconds"]
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
    lines = [
        "| job | every step captured | `--whole-run` | plain estimate | share of the time |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows.values():
        lines.append(
            f"| `{row['command'].removeprefix('bench/whole_run_jobs/')}` "
            f"| {row['complete']['reserved_bytes'] / 2**30:.2f} GiB "
            f"| {row['whole_run_error']:+.2%} | {row['plain_error']:+.1%} "
            f"| {row['time_share']:.0%} |"
        )
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks {BEGIN!r} or {END!r}")
    table = "".join(f"{line}\n" for line in lines)
    PAGE.write_text(before + BEGIN + table + END + after, encoding="utf-8")


def known() -> dict[str, Row]:
    """Rows of an earlier run."""
    path = Path(RESULTS / "whole_run.json")
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    return {name: row for name, row in data.items() if name in JOBS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="NAME", choices=[*JOBS, []])
    wanted = parser.parse_args().jobs
    rows = known() if wanted else {}
    for name in wanted or JOBS:
        row = rows[name] = compare(JOBS[name])
        print(
            f"{name:20s} {row['whole_run_error']:+8.2%} (plain {row['plain_error']:+.1%}) of "
            f"{row['complete']['reserved_bytes'] / 2**30:.2f} GiB, "
            f"{row['whole_run']['steps']}+{row['whole_run']['simulated_steps']} steps for "
            f"{row['complete']['steps']}, {row['time_share']:.0%} of the time",
            flush=True,
        )
    rows = {name: rows[name] for name in JOBS if name in rows}
    data = {"summary": summary(rows), **rows}
    write_table(rows)
    write_result("whole_run", data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
