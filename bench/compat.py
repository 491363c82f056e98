"""The support matrix: memplan with several releases of PyTorch, each in its own environment.

`make compat` installs every release, the CPU build where the index has one, else the CUDA build
(gigabytes), and memplan's wheel from this tree; asks `memplan env` whether capturing works;
captures four small trainings, one a rank of a job; finds a plan for a fifth and runs it; and trains
with `auto_checkpoint`, `memplan.compile` and `torch.compile(backend="memplan")`. What could not be
run is a row that says so. Results of other machines and builds stay: rows are replaced one by one,
as they come. Writes `bench/results/compat.json` and the table in `docs/support.md`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench.pages import markdown_table, write_between
from bench.results import ROOT, known_result, write_result

RELEASES = ("2.11", "2.12", "2.13", "2.14", "newest")
JOB = "bench/compat_jobs/train.py"
JOBS = {name: (JOB, name) for name in ("mlp", "conv", "decoder")} | {
    "ddp": ("torchrun", "--nproc-per-node", "2", "bench/compat_jobs/ddp.py")
}
IN_PROCESS = "bench.compat_jobs.in_process"
SAME = "same numbers"
PLANNED = "bench/fit_jobs/mlp.py"
PLANNED_CARD = "940MiB"
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- MATRIX -->\n", "<!-- END OF MATRIX -->\n"
SECONDS = 900
FITS, DOES_NOT_FIT = 0, 3

Row = dict[str, Any]


class Build(NamedTuple):
    """A release of PyTorch as the index has it."""

    version: str
    """As asked for: `2.13.0+cpu`."""
    cuda: bool

    @property
    def release(self) -> str:
        return self.version.partition("+")[0]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS)


def known_versions() -> list[str]:
    """Versions of torch on the configured index, newest first."""
    done = run(sys.executable, "-m", "pip", "index", "versions", "torch")
    found = re.search(r"Available versions: (.*)", done.stdout)
    if found is None:
        raise SystemExit(f"the index does not answer: {done.stderr.strip()[-300:]}")
    return found[1].split(", ")


def choose(asked: str, known: list[str]) -> Build | None:
    """The newest build of a release, the CPU build where there is one; None where there is none.

    Local versions (`+cpu`) are what tells a CPU build from PyPI's CUDA build on Linux; elsewhere
    there is one build, for the CPU.
    """
    release = asked if asked != "newest" else known[0].partition("+")[0]
    same = [v for v in known if v.partition("+")[0] == release or v.startswith(f"{release}.")]
    if not same:
        return None
    cpu = [version for version in same if version.endswith("+cpu")]
    version = (cpu or same)[0]
    return Build(version, cuda=not cpu and platform.system() == "Linux")


def build_wheel(folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    done = run(*pip, "-w", str(folder), str(ROOT))
    if done.returncode:
        raise SystemExit(f"memplan cannot be built: {done.stderr[-1000:]}")
    return next(folder.glob("memplan-*.whl"))


def install(build: Build, wheel: Path, folder: Path) -> Path:
    """An environment with both; its Python. Raises RuntimeError with pip's words."""
    python = folder / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", str(folder))
    pip = (str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check")
    for words in (
        (f"torch=={build.version}",),
        ("--force-reinstall", "--no-deps", str(wheel)),
        (str(wheel),),
    ):
        done = run(*pip, *words)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-300:])
    return python


def check(python: Path, build: Build) -> Row:
    """The row of one build: what passed, and the first thing that did not."""
    row = empty_row(build) | {"date": datetime.now(UTC).date().isoformat()}
    environment = memplan(python, "env", "--json")
    if environment.returncode:
        return row | {"result": "fails", "detail": last_line(environment.stderr)}
    found = json.loads(environment.stdout)
    row |= {
        "torch": found["torch_version"],
        "python": found["python"],
        "gpu": found["gpu"] or "none",
        "self_test": "passes" if found["capture_ok"] else "fails",
        "detail": "" if found["capture_ok"] else found["capture_detail"],
    }
    problems = {name: captured(python, *words) for name, words in JOBS.items()}
    for name, problem in problems.items():
        row["detail"] = row["detail"] or (problem and f"{name}: {problem}")
    works = list(problems.values()).count("")
    row["captures"] = f"{works}/{len(JOBS)}"
    problem = apply_plan(python) or in_process(python)
    row["plan"] = "same losses" if not problem else "fails"
    row["detail"] = row["detail"] or problem
    passed = row["self_test"] == "passes" and works == len(JOBS) and not problem
    return row | {"result": "works" if passed else "fails"}


def captured(python: Path, *words: str) -> str:
    """Whether a job is captured for some steps; what is wrong, or nothing."""
    done = memplan(python, "estimate", "--gpu", "24GiB", "--json", *words)
    if done.returncode not in (FITS, DOES_NOT_FIT):
        return last_line(done.stderr)
    return "" if json.loads(done.stdout)["steps"] >= 2 else "fewer than two steps were captured"


def in_process(python: Path) -> str:
    """What has other numbers than plain steps, or takes more than its budget; or nothing."""
    done = run(str(python), "-m", IN_PROCESS)
    if done.returncode:
        return f"{IN_PROCESS}: {last_line(done.stderr)}"
    return next((line for line in done.stdout.splitlines() if not line.endswith(SAME)), "")


def apply_plan(python: Path) -> str:
    """Find a plan, run the script with it and without; what is wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "job.plan")
        fitted = memplan(python, "fit", "--gpu", PLANNED_CARD, "-o", plan, PLANNED)
        if fitted.returncode:
            return f"fit: {last_line(fitted.stderr) or fitted.stdout.splitlines()[0]}"
        runs = [
            memplan(python, "run", *words, PLANNED, "--device", "cpu")
            for words in ((), ("--plan", plan))
        ]
    for done in runs:
        if done.returncode:
            return f"run: {last_line(done.stderr)}"
    plain, planned = ([x for x in r.stdout.splitlines() if x.startswith("loss")] for r in runs)
    return "" if plain and plain == planned else "run: the losses differ"


def memplan(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """From the tree, so that relative paths are found; none of its folders is one of modules."""
    return run(str(python), "-P", "-m", "memplan", *words)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("memplan:")]
    return (lines or text.strip().splitlines() or [""])[-1][:200]


def empty_row(build: Build) -> Row:
    return {
        "torch": build.version,
        "build": "CUDA" if build.cuda else "CPU",
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "gpu": "none",
        "self_test": "",
        "captures": "",
        "plan": "",
        "result": "not run",
        "detail": "",
        "date": "",
    }


def key(row: Row) -> tuple[str, ...]:
    release, python = row["torch"].partition("+")[0], row["python"].rpartition(".")[0]
    gpu = "with" if row["gpu"] != "none" else "without"
    return (release, row["build"], row["os"], python, gpu)


def merged(rows: list[Row], before: list[Row]) -> list[Row]:
    """New rows in the place of old ones of the same key; one that was not run replaces none."""
    table = {key(row): row for row in before}
    for row in rows:
        if row["result"] != "not run" or table.get(key(row), row)["result"] == "not run":
            table[key(row)] = row
    return [table[one] for one in sorted(table, key=lambda one: (_number(one[0]), one[1:]))]


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def table(rows: list[Row]) -> str:
    names = ("torch", "build", "gpu", "os", "python", "self_test", "captures", "plan")
    head = ["torch", "build", "GPU", "OS", "Python", "self-test", "captures", "plan applied"]
    lines = []
    for row in rows:
        result = f"{row['result']}: {row['detail']}" if row["detail"] else row["result"]
        cells = [*(row[name] for name in names), result, row["date"]]
        lines.append([str(cell).replace("|", "/") or "–" for cell in cells])
    return "".join(f"{line}\n" for line in markdown_table([*head, "result", "date"], lines))


def write_page(rows: list[Row]) -> None:
    write_between(PAGE, BEGIN, END, table(rows))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", nargs="+", default=RELEASES, metavar="X.Y|newest")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compat")
    options = parser.parse_args(arguments)
    known = known_versions()
    builds = {build for one in options.releases if (build := choose(one, known)) is not None}
    wanted = sorted(builds, key=lambda build: _number(build.release))
    rows = []
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel: Path | None = None
        for build in wanted:
            wheel = wheel or build_wheel(Path(folder))
            try:
                python = install(build, wheel, options.folder / build.version)
                rows.append(check(python, build))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                rows.append(empty_row(build) | {"detail": f"not installed: {error}"[:200]})
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            every = merged(rows[-1:], known_result("compat").get("rows", []))
            failed = sum(row["result"] == "fails" for row in every)
            write_result("compat", {"rows": every, "failed": failed})
            write_page(every)
    return 1 if any(row["result"] == "fails" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
