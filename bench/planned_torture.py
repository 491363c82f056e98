"""Ten million random operations through the real allocator library, from four threads.

    python -m bench.planned_torture [OPERATIONS]

The program is `native/planned/torture.cpp` over the stand-in CUDA driver: requests, releases, uses
by other streams, plans that come and go, memory that runs out and calls that fail; every block's
bytes are checked before its release. Some minutes on two cores. Writes
`bench/results/planned_torture.json`; with a number of operations named, nothing is written.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any

from bench.planned_speed import BUILD, build
from bench.results import write_result

OPERATIONS = 10_000_000
THREADS = 4
SEED = 1
_TOTALS = re.compile(r"(\d+) requests of (\d+) threads, (\d+) refused, (\d+) errors")
_SERVED = re.compile(r"(\d+) (planned|dynamic|adopted|missed|resyncs|retries|waits)")


def measure(operations: int = OPERATIONS) -> dict[str, Any]:
    """What the program counts, and the seconds that it took. Raises RuntimeError where it ends
    without its last line."""
    program = build(BUILD, "memplan_torture") / "memplan_torture"
    words = [str(program), str(operations), str(SEED), str(THREADS)]
    start = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    totals = _TOTALS.search(done.stdout)
    if totals is None:
        raise RuntimeError(f"the torture ended with {done.returncode}: {done.stderr[-2000:]}")
    requests, threads, refused, errors = map(int, totals.groups())
    table: dict[str, Any] = {
        "operations": operations,
        "requests": requests,
        "threads": threads,
        "refused": refused,
        "errors": errors,
        "exit_code": done.returncode,
        "seconds": seconds,
    }
    for count, what in _SERVED.findall(done.stdout):
        table[what] = table.get(what, 0) + int(count)
    return table


def main(arguments: list[str]) -> None:
    table = measure(int(arguments[0]) if arguments else OPERATIONS)
    print(", ".join(f"{count:,.0f} {what}" for what, count in table.items()))
    if not arguments:
        print(write_result("planned_torture", table))


if __name__ == "__main__":
    main(sys.argv[1:])
