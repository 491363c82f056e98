"""Result files: what was measured, when, on which commit and which machine.

A benchmark calls `write_result(name, data)`; `bench/goals.toml` says what `data` must show.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
VERSIONED = ("memplan", "torch", "numpy", "torchvision", "transformers", "peft", "accelerate")


def result_path(name: str) -> Path:
    """Where the result called `name` lies."""
    return RESULTS / f"{name}.json"


def known_result(name: str) -> dict[str, Any]:
    """The `data` of the result called `name`; nothing where there is none."""
    path = result_path(name)
    if not path.exists():
        return {}
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["data"]
    return data


def write_result(name: str, data: dict[str, Any]) -> Path:
    """Write `data` (JSON values) as `bench/results/<name>.json` with its circumstances.

    Returns the file's path. Raises ValueError when `data` holds a NaN, an infinity, or anything
    JSON has no word for: a result that cannot be compared is no result.
    """
    document = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_commit(),
        "machine": _machine(),
        "versions": _versions(),
        "data": data,
    }
    try:
        text = json.dumps(document, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"result {name!r}: {error}") from error
    path = result_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _commit() -> dict[str, Any]:
    """The commit, and whether tracked files other than results differ from it.

    A copy of the tree without its `.git` (carried to another machine) may name its commit in
    `MEMPLAN_COMMIT`; whether it was edited since is then not known (None).
    """
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if commit is None:
        return {"commit": os.environ.get("MEMPLAN_COMMIT"), "dirty": None}
    changes = _output(
        "git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no",
        "--", ".", ":(exclude)bench/results",
    )  # fmt: skip
    return {"commit": commit, "dirty": bool(changes)}


def _machine() -> dict[str, Any]:
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    gpu = _output("nvidia-smi", *query) if shutil.which("nvidia-smi") else None
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu,
        "os": platform.platform(),
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in VERSIONED:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _field(file: str, key: str) -> str | None:
    """The value of the first `key : value` line of a file under /proc."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
