"""What the suites for a machine with a GPU have in common on the command line."""

from __future__ import annotations

import argparse
import sys

from memplan.runtime import nvml


def suite_parser(description: str | None, budget_seconds: float) -> argparse.ArgumentParser:
    """The options of every suite: `--budget`, `--only`, `--dry-run`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget", type=float, default=budget_seconds, help="seconds in all")
    parser.add_argument("--only", default="", help="jobs whose name holds this text")
    parser.add_argument("--dry-run", action="store_true", help="print the first commands, run none")
    return parser


def gpu_is_missing() -> bool:
    """Whether there is no NVIDIA GPU here, which it says."""
    missing = nvml.used_bytes() is None
    if missing:
        print("no NVIDIA GPU: its driver's library does not answer", file=sys.stderr)
    return missing
