"""Run scripts that nobody here wrote under `memplan estimate`.

    python -m bench.scripts [--list] [--show] [--missing] [--only NAME …]

Writes `bench/results/scripts.json` after each, and the table of docs/scripts.md from it; what was
not run stays in it as it was, each result has its own date. Exit code 1 when an answer is not as it
should be; a case whose package or data cannot be had is reported and counts as failed.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bench.results import write_result
from bench.scripts.case import Case
from bench.scripts.environment import BUILD, CannotPrepareError
from bench.scripts.runner import run
from bench.scripts.suite import cases
from bench.scripts.table import read, write_page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scripts", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases")
    parser.add_argument("--missing", action="store_true", help="those without a good result")
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
    if options.missing:
        earlier = read()
        names = [name for name in names if not earlier.get(name, {}).get("ok")]
    good = True
    for name in names:
        result = _one(known[name], show=options.show)
        good = good and result["ok"]
        keep(name, result, list(known))
    print(write_page())
    return 0 if good else 1


def keep(name: str, result: dict[str, Any], known: Sequence[str]) -> None:
    """Put one result beside those that are there, in the order of `known`; others are dropped."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "results.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of other cases writes to the same file
        data = {**read(), name: result}
        write_result("scripts", {key: data[key] for key in known if key in data})


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
