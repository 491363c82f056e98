"""Measure every model and every graph: writes `bench/results/recompute.json` and its page.

    python -m bench.recompute [--part models|budgets] [--only NAME] [--processes 2]

`--part` measures one half anew and keeps the other as the result file has it. `--only` prints what
it finds about one model or graph, as JSON, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from bench.recompute import budgets, contest, models, summary, table
from bench.recompute.worker import quiet
from bench.results import result_path, write_result

PARTS = ("models", "budgets")


def measure_all(processes: int, parts: Sequence[str], only: str = "") -> dict[str, Any]:
    """Each model and each graph in a process of its own, in parallel."""
    jobs = [("models", name, contest.run) for name in models.CASES]
    jobs += [("budgets", name, budgets.run) for name in budgets.GRAPHS]
    jobs = [job for job in jobs if job[0] in parts and (not only or job[1] == only)]
    data: dict[str, Any] = {"models": {}, "budgets": {}, "failures": {}}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=quiet, max_tasks_per_child=1
    ) as pool:
        running: list[tuple[str, str, Future[dict[str, Any]]]] = [
            (part, name, pool.submit(run, name)) for part, name, run in jobs
        ]
        for part, name, future in running:
            try:
                data[part][name] = future.result()
            except Exception as error:  # told in the result; the others go on
                data["failures"][f"{part}.{name}"] = f"{type(error).__name__}: {error}"
            print(table.line(part, name, data), file=sys.stderr, flush=True)
    return data


def main() -> int:
    names = sorted({*models.CASES, *budgets.GRAPHS})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--processes", type=int, default=2, help="models at a time")
    parser.add_argument("--part", choices=PARTS, help="default: both")
    options = parser.parse_args()
    parts = (options.part,) if options.part else PARTS
    data = measure_all(options.processes, parts, options.only)
    if options.only:
        print(json.dumps(data, indent=2))
    else:
        for part in set(PARTS) - set(parts):
            before = json.loads(result_path("recompute").read_text())
            data[part] = before["data"][part]
            when = f"{part}_measured"
            data[when] = before["data"].get(when, {key: before[key] for key in ("date", "commit")})
        data["summary"] = summary.summarize(data)
        path = write_result("recompute", data)
        print(path)
        table.write_docs(path)
    return 1 if data["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
