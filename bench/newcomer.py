"""A newcomer's path from a clean environment to a verdict and a picture (`newcomer.json`).

The commands of the README, as they are typed, in a new virtual environment and from a new clone of
this repository. What is downloaded is downloaded beforehand and not counted; the native library is
compiled, and counted.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from bench.results import ROOT, write_result

COMMANDS = (
    "python -m venv .venv",
    "pip install ./memplan",
    "memplan estimate --gpu rtx4090 -o job.trace memplan/examples/gpt2/train.py",
    "memplan report -o report.html job.trace",
)


def fetch(wheels: Path) -> None:
    """What `pip install ./memplan` would fetch, its build's requirements included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["build"]]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, "-d", str(wheels), *wanted], check=True)


def timed(command: str, folder: Path, wheels: Path) -> dict[str, float | str]:
    """Raises RuntimeError for a command that fails."""
    program, *words = shlex.split(command)
    inside = folder / ".venv" / "bin"
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("PIP_")},
        "PATH": f"{inside}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    found = inside / program
    path = str(found) if found.exists() else sys.executable
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        [path, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    shown = done.stdout.splitlines()[0] if done.stdout else ""
    return {"command": command, "seconds": seconds, "cpu_seconds": cpu, "shown": shown}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, wheels = Path(name) / "home", Path(name) / "wheels"
        folder.mkdir()
        fetch(wheels)
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "memplan")], check=True)
        steps = []
        for command in COMMANDS:
            steps.append(timed(command, folder, wheels))
            print(steps[-1], flush=True)
        page_bytes = (folder / "report.html").stat().st_size
    write_result(
        "newcomer",
        {
            "steps": steps,
            "commands": len(steps),
            "seconds": sum(float(step["seconds"]) for step in steps),
            "cpu_seconds": sum(float(step["cpu_seconds"]) for step in steps),
            "page_bytes": page_bytes,
        },
    )


if __name__ == "__main__":
    main()
