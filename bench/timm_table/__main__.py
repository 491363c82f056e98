"""Capture rows of the table that are not captured yet: `python -m bench.timm_table [--models N]`.

Rows come in an order of which every beginning is spread over timm's families, so that a run that is
stopped leaves a fair sample. `--only TEXT` narrows it to models whose name holds the text.

With `--fits`: each model in one memory format, at its batch and at the next larger one of those
that were tried; then all such captures there are, of earlier calls too, are answered and held to
what ran (`bench/results/timm_fits.json`, whose other rows stay). `--models 0` captures no more.
"""

from __future__ import annotations

import argparse
import sys

from bench.results import known_result, write_result
from bench.timm_table.capture import capture_all
from bench.timm_table.fits import asked, one_format_each, score
from bench.timm_table.rows import families, read_rows, spread_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=None, help="so many at most")
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--memory-format", choices=("nchw", "nhwc"), default=None)
    parser.add_argument("--fits", action="store_true", help="hold verdicts to what ran")
    options = parser.parse_args()
    try:
        rows = read_rows()
    except OSError as error:
        print(f"no measured table: {error}; set MEMPLAN_SHARED_DATA", file=sys.stderr)
        return 2
    rows = spread_out(rows, families([row.model for row in rows]))
    names = [name for name in dict.fromkeys(row.model for row in rows) if options.only in name]
    chosen = set(names[: options.models])
    failed = 0
    wanted = [
        row
        for row in (one_format_each(rows) if options.fits else rows)
        if row.model in chosen and options.memory_format in (None, row.memory_format)
    ]
    if options.fits:
        wanted = [job for row in wanted for job, _ in asked(row)]
    for key, said in capture_all(wanted):
        failed += said.startswith("failed")
        print(f"{key:60s} {said}", flush=True)
    if options.fits:
        found = score(one_format_each(rows), known=known_result("timm_fits").get("rows"))
        print({name: value for name, value in found.items() if name != "rows"})
        print(write_result("timm_fits", found))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
