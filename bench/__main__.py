"""Run the benchmarks that `goals.toml` names, each in its own process, then check the goals.

    python -m bench [NAME …]      all of them, or the named results only

Exit code 1 when a benchmark failed or a goal is missed.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib

from bench import check
from bench.results import ROOT


def main(names: list[str]) -> int:
    producers = tomllib.loads(check.GOALS.read_text(encoding="utf-8"))["producers"]
    unknown = set(names) - set(producers)
    if unknown:
        print(f"no benchmark {sorted(unknown)}; there are {sorted(producers)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or producers:
        print(f"== {name}", flush=True)
        if subprocess.run((sys.executable, "-m", producers[name]), cwd=ROOT).returncode:
            failed.append(name)
    missed = check.main([])
    if failed:
        print(f"benchmarks that failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
