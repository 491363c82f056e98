"""Estimate every measured job and compare: writes `bench/results/accuracy.json`.

    python -m bench.accuracy [--only TEXT] [--jobs FILE] [--processes 2] [--installed-transformers]

A partial run (`--only`), or one over other jobs (`h200.csv`), prints its rows and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.accuracy.environment import TRANSFORMERS, transformers_site
from bench.accuracy.rows import Row, job_rows, llm_rows
from bench.accuracy.summary import Answer, Compared, as_json, summarize_jobs, summarize_llm
from bench.accuracy.table import line, write_docs
from bench.process import watch
from bench.results import ROOT, write_result

TIMEOUT_SECONDS = 900.0


def estimate(row: Row, variant: str, site: Path | None) -> Answer:
    """One `memplan estimate` of one command. Raises RuntimeError when it gives no answer."""
    command = [sys.executable, "-m", "memplan", "estimate", "--json", "--gpu", row.gpu]
    paths = [os.environ.get("PYTHONPATH", "")]
    if site is not None and not row.current:
        paths.insert(0, str(site))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = watch([*command, *row.commands[variant]], cwd=ROOT, env=env, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{row.key} {variant}: no answer in {error.timeout:.0f} s") from None
    if done.code not in (0, 3):
        raise RuntimeError(f"{row.key} {variant}: exit code {done.code}\n{done.stderr[-1500:]}")
    answer = json.loads(done.stdout)
    low, high = (
        answer[f"{row.measure.removesuffix('_peak')}_{end}_bytes"] for end in ("low", "high")
    )
    return Answer(
        variant=variant,
        bytes=answer[f"{row.measure}_bytes"],
        low_bytes=low,
        high_bytes=high,
        fits=answer["fits"],
        retries=answer["num_alloc_retries"],
        seconds=done.seconds,
    )


def compare(row: Row, site: Path | None) -> Compared:
    """A row with the answers of all its variants; what failed is told in words."""
    answers, failures = [], []
    for variant in row.commands:
        try:
            answers.append(estimate(row, variant, site))
        except RuntimeError as error:
            failures.append(str(error))
    return Compared(row, answers, failures)


def run(rows: list[Row], site: Path | None, processes: int) -> tuple[list[Compared], list[str]]:
    """(compared rows in order, failures); prints each row as its turn comes."""
    compared, failures = [], []
    with ThreadPoolExecutor(processes) as pool:
        for one in pool.map(lambda row: compare(row, site), rows):
            failures += one.failures
            if one.answers:
                compared.append(one)
                print(line(as_json(one)), flush=True)
            for failure in one.failures:
                print(failure, file=sys.stderr)
    return compared, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose key holds this text")
    parser.add_argument("--jobs", type=Path, metavar="FILE", help="in place of those measured")
    parser.add_argument("--processes", type=int, default=2, help="estimates at a time")
    parser.add_argument("--installed-transformers", action="store_true", help="not the old one")
    options = parser.parse_args()
    try:
        rows = {"jobs": job_rows(options.jobs), "llm": [] if options.jobs else llm_rows()}
    except OSError as error:
        print(f"no measured jobs: {error}; set MEMPLAN_SHARED_DATA", file=sys.stderr)
        return 2
    site = None if options.installed_transformers else transformers_site()
    data: dict[str, Any] = {"transformers_of_the_jobs": TRANSFORMERS if site else "installed"}
    failed = []
    for name, summarize in (("jobs", summarize_jobs), ("llm", summarize_llm)):
        chosen = [row for row in rows[name] if options.only.lower() in row.key.lower()]
        compared, failures = run(chosen, site, options.processes)
        failed += failures
        if compared:
            data[name] = {**summarize(compared), "rows": [as_json(one) for one in compared]}
            shown = {k: round(v, 4) for k, v in data[name].items() if isinstance(v, int | float)}
            print(f"{name}: {shown}")
    data["failures"] = failed
    if not options.only and not options.jobs:
        path = write_result("accuracy", data)
        print(path)
        write_docs(path)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
