"""Estimate Megatron-LM's functional tests, and hold the answers against their golden memory.

    python -m bench.megatron [--list] [--show] [--missing] [--jobs N] [--only CASE …]

CASE is a name of `golden.csv`, with or without `@h100` or `@a100`. Writes
`bench/results/megatron.json` after each, and the table of docs/megatron.md; what was not run stays
in it as it was. Ends without a result where the data are absent.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.megatron.cases import BUILD, Golden, goldens
from bench.megatron.environment import prepare
from bench.megatron.runner import run
from bench.megatron.table import read, summary, write_page
from bench.results import write_result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.megatron", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases")
    parser.add_argument("--missing", action="store_true", help="those without an answer")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--show", action="store_true", help="print what memplan says, too")
    options = parser.parse_args()
    known = goldens()
    if not known:
        print("the measured data are not here", file=sys.stderr)
        return 0
    if options.list:
        print("\n".join(golden.name for golden in known))
        return 0
    wanted = set(options.only or ())
    chosen = [g for g in known if not wanted or wanted & {g.name, g.case}]
    unknown = wanted - {name for golden in known for name in (golden.name, golden.case)}
    if unknown:
        print(f"no case {sorted(unknown)}; --list names them", file=sys.stderr)
        return 2
    if options.missing:
        earlier = read()
        chosen = [g for g in chosen if not earlier.get(g.name, {}).get("answered")]
    source = prepare()
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda golden: _one(golden, source, known, show=options.show), chosen))
    print(write_page())
    return 0


def _one(golden: Golden, source: Path, known: list[Golden], *, show: bool) -> None:
    result = run(golden, source, show=show)
    result["date"] = datetime.now(UTC).isoformat(timespec="minutes")
    keep(golden.name, result, known)
    said = f"{100 * result['error']:+7.2f} %" if result["answered"] else result["complaint"][:200]
    print(f"{golden.name:90s} {result.get('seconds', 0):6.1f} s  {said}", flush=True)


def keep(name: str, result: dict[str, Any], known: list[Golden]) -> None:
    """Put one result beside those that are there, in the order of the cases."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "results.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = {**read(), name: result}
        cases = {golden.name: data[golden.name] for golden in known if golden.name in data}
        write_result("megatron", {"summary": summary(cases, len(known)), "cases": cases})


if __name__ == "__main__":
    sys.exit(main())
