"""What the suites for a machine with a GPU have in common: options, and processes on a budget."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.results import ROOT, result_path
from memplan.runtime import nvml

LEAST_SECONDS = 15.0
"""Nothing is started with less of the budget left."""
CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without a fixed one cuBLAS does not promise the same bits each time."""
NO_TIME = "no time left"
HOST_AT_ONCE = 4
MOST_THREADS = 32

Execute = Callable[[list[str], dict[str, str], float], tuple[int, str, str]]
"""Runs a command: (command, environment, timeout) to (exit code, stdout, stderr)."""


def execute(command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
    """Run to the end, or killed at the timeout (code 124)."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, timeout=timeout, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"killed after {timeout:.0f} s"
    return done.returncode, done.stdout, done.stderr


@dataclass
class TimedSuite:
    """One run of a suite: its work folder and its clock."""

    work: Path
    budget: float
    """Seconds in all."""
    run: Execute = execute
    clock: Callable[[], float] = time.monotonic
    at_once: int = 1
    """Processes on the card at a time."""

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.card = threading.Semaphore(self.at_once)
        self.host = threading.Semaphore(HOST_AT_ONCE)
        """Held by processes that need no card, such as captures."""

    def each(
        self, names: Iterable[str], job: Callable[[str], None], save: Callable[[], None]
    ) -> None:
        """All jobs at the same time, as far as `card` and `host` let them; saved after each."""
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            for done in as_completed([pool.submit(job, name) for name in names]):
                done.result()
                save()

    def time_for(self, wanted: float) -> float:
        """Seconds that a process may take; 0 when too little is left to begin it."""
        left = self.budget - (self.clock() - self.started)
        return min(wanted, left) if left >= LEAST_SECONDS else 0.0

    def ask(
        self, command: list[str], out: Path, wanted: float, env: dict[str, str]
    ) -> dict[str, Any]:
        """What a process on the card writes to `out` within `wanted` seconds, or `error`."""
        with self.card:
            seconds = self.time_for(wanted)
            if not seconds:
                return {"error": NO_TIME}
            code, _, stderr = self.run(command, {**os.environ, **env}, seconds)
        if not out.exists():
            return {"error": failure(code, stderr)}
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def failure(code: int, stderr: str) -> str:
    """Why a process has no result."""
    return f"exit code {code}: {stderr[-1500:]}"


def last_line(error: object) -> str:
    """A failure for a person."""
    return "failed: " + str(error).strip().splitlines()[-1][:150]


def suite_parser(description: str | None, budget_seconds: float) -> argparse.ArgumentParser:
    """The options of every suite: `--budget`, `--only`, `--at-once`, `--dry-run`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget", type=float, default=budget_seconds, help="seconds in all")
    parser.add_argument("--only", default="", help="jobs whose name holds one of these texts: a,b")
    parser.add_argument("--at-once", type=int, default=1, help="processes on the card at a time")
    parser.add_argument("--again", action="store_true", help="estimate anew what was measured")
    parser.add_argument("--dry-run", action="store_true", help="print the first commands, run none")
    return parser


def measured_once(name: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The committed result `name`, to be estimated anew: its data, and where and when it was
    measured. None, and says so, where this machine has another release of PyTorch."""
    before = json.loads(result_path(name).read_text(encoding="utf-8"))
    there, here = before["versions"]["torch"], version("torch").partition("+")[0]
    if here != there.partition("+")[0]:
        print(f"measured with PyTorch {there}: estimate with it, not with {here}", file=sys.stderr)
        return None
    data: dict[str, Any] = before["data"]
    on = {key: before[key] for key in ("date", "commit", "machine", "versions")}
    return data, data.get("measured_on", on)


def run_suite(
    options: argparse.Namespace,
    commands: dict[str, str],
    measure: Callable[[Path, list[str]], int],
    again: Callable[[Path, list[str]], int] | None = None,
) -> int:
    """Have `measure(folder for files, names of jobs)` run the jobs asked for, or `again` with
    `--again`, or print the first command of each. Exit code: that of the function; 2 without a
    GPU."""
    wanted = options.only.split(",")
    names = [name for name in commands if any(text in name for text in wanted)]
    if options.dry_run:
        for name in names:
            print(commands[name])
        return 0
    if options.again:
        if again is None:
            print("--again: what this suite foresees is part of its runs", file=sys.stderr)
            return 2
        measure = again
    elif gpu_is_missing():
        return 2
    with tempfile.TemporaryDirectory() as work:
        return measure(Path(work), names)


def gpu_is_missing() -> bool:
    """Whether there is no NVIDIA GPU here, which it says."""
    missing = nvml.used_bytes() is None
    if missing:
        print("no NVIDIA GPU: its driver's library does not answer", file=sys.stderr)
    return missing
