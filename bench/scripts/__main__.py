"""Run scripts that nobody here wrote under `memplan estimate`.

    python -m bench.scripts [--list] [--show] [--only NAME …]

Writes `bench/results/scripts.json`; what was not run stays in it as it was, each result has its own
date. Exit code 1 when an answer is not as it should be; a case whose package or data cannot be had
is reported and counts as failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container
from datetime import UTC, datetime
from typing import Any

from bench.results import result_path, write_result
from bench.scripts.case import Case
from bench.scripts.environment import CannotPrepareError
from bench.scripts.runner import run
from bench.scripts.suite import cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scripts", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--show", action="store_true", help="print what memplan says, too")
    options = parser.parse_args()
    known = {case.name: case for case in cases()}
    if options.list:
        print("\n".join(known))
        return 0
    names = options.only or list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no case {unknown}; there are {sorted(known)}", file=sys.stderr)
        return 2
    results = {name: _one(known[name], show=options.show) for name in names}
    print(write_result("scripts", {**_earlier(known), **results}))
    return 0 if all(result["ok"] for result in results.values()) else 1


def _earlier(known: Container[str]) -> dict[str, Any]:
    """The results that are there, of cases that still are."""
    path = result_path("scripts")
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    return {name: result for name, result in data.items() if name in known}


def _one(case: Case, *, show: bool) -> dict[str, Any]:
    try:
        result = run(case, show=show)
    except CannotPrepareError as error:
        result = {"package": case.package, "ok": False, "complaints": [f"cannot prepare: {error}"]}
    result["date"] = datetime.now(UTC).isoformat(timespec="minutes")
    peak = result.get("peak_bytes")
    size = f"{peak / 2**30:8.2f} GiB" if peak else f"exit {result.get('exit_code', '-')!s:>7}"
    print(f"{case.name:28s} {size} {result.get('seconds', 0):6.1f} s", flush=True)
    for complaint in result["complaints"]:
        print(f"    {complaint}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
