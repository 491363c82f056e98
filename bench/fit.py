"""`memplan fit` on thirty jobs that do not fit their card, and on three for real.

    python -m bench.fit [NAME …]      those of `bench/fit_jobs/jobs.toml`, or the named ones only

Each is asked with `--allow exact` and, where that says no, with `--allow rounding`. A plan that
fits is captured once more by `memplan estimate --plan`, whose peak is held to the promise. Each
answer is kept in `build/fit`: what has one from the same `src/` is not run again, unless it is
named. Three small jobs are run on the CPU too, with their plan and without: losses and peaks.
Once every job has an answer, or with `--partial`, writes `bench/results/fit.json` and the table in
`docs/fit.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.pages import write_between
from bench.process import watch
from bench.results import ROOT, known_result, write_result
from bench.scripts.environment import THIRD_PARTY

LIST = Path(__file__).with_name("fit_jobs") / "jobs.toml"
KEPT = ROOT / "build" / "fit"
PAGE = ROOT / "docs" / "fit.md"
BEGIN, END = "<!-- THIRTY JOBS -->\n", "<!-- END OF THIRTY JOBS -->\n"
SECONDS = 1800.0
"""For one answer; a job that takes longer has none."""
GROUPS = {
    "card": "One card, eager",
    "language": "Language models of 1–8 B parameters on 24 and 80 GB",
    "many": "Several ranks, or compiled",
}

Row = dict[str, Any]

# Small enough for a CPU: card and script. Their losses are printed to the last bit.
REAL = {
    "mlp": ("940MiB", "bench/fit_jobs/mlp.py"),
    "diffusion": (
        "1200MiB",
        "bench/fit_jobs/diffusion.py --width 128 --heads 4 --layers 6 --batch-size 64 --steps 3",
    ),
    "wide_mlp": ("1800MiB", "bench/fit_jobs/mlp.py --width 1024 --blocks 8"),
}


class Job(NamedTuple):
    """A row of the list; `words` are the launcher, the script and its arguments."""

    name: str
    group: str
    gpu: str
    words: str
    options: str = ""
    folder: str = "."

    @property
    def place(self) -> Path:
        """Where the script is started."""
        return ROOT / self.folder.replace("{third_party}", str(THIRD_PARTY))

    def command(self, command: str, *more: str) -> list[str]:
        return [command, *more, "--gpu", self.gpu, *self.options.split(), *shlex.split(self.words)]

    def what(self) -> Row:
        """What makes a kept answer another job's."""
        return {"gpu": self.gpu, "job": self.words, "options": self.options}


def read_jobs(file: Path = LIST) -> dict[str, Job]:
    """The list, by name. Raises ValueError where two jobs have the same."""
    found: dict[str, Job] = {}
    for group, jobs in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for name, row in jobs.items():
            if name in found:
                raise ValueError(f"{file}: two jobs are called {name}")
            more = {key: row[key] for key in ("options", "folder") if key in row}
            found[name] = Job(name, group, row["gpu"], row["job"], **more)
    return found


def memplan(words: Sequence[str], folder: Path = ROOT, measure: str = "") -> tuple[str, float]:
    """stdout and wall seconds. Raises RuntimeError when it says neither yes nor no."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEASURE": measure}
    command = [sys.executable, "-m", "memplan", *words]
    try:
        done = watch(command, cwd=folder, env=environment, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"memplan {words[0]}: no answer within {SECONDS:.0f} s") from None
    if done.code not in (0, 3):
        raise RuntimeError(f"memplan {words[0]}: exit code {done.code}: {done.stderr[-2000:]}")
    return done.stdout, done.seconds


def fit(job: Job, plan: Path) -> Row:
    """What `memplan fit` says of a job, and whether the promise holds in another capture.

    Raises RuntimeError where there is no answer."""
    seconds = 0.0
    captures = 0
    refused: dict[str, Row] = {}
    for allow in ("exact", "rounding"):
        options = ("--json", "--allow", allow, "-f", "-o", str(plan))
        out, took = memplan(job.command("fit", *options), job.place)
        answer = json.loads(out)
        seconds += took
        captures += 1 + len(answer["attempts"])
        if answer["fits"]:
            break
        refused[allow] = nearest(answer)
    after = answer["after"] or answer["before"]
    row = {
        "group": job.group,
        **job.what(),
        "seconds": round(seconds, 2),
        "captures": captures,
        "fits": answer["fits"],
        "exact": answer["fits"] and all(lever["numbers"] == "exact" for lever in answer["levers"]),
        "levers": sorted({lever["kind"] for lever in answer["levers"]}),
        "card_bytes": answer["gpu"]["total_bytes"],
        "plain_peak_bytes": answer["before"]["peak_bytes"],
        "plain_high_bytes": answer["before"]["high_bytes"],
        "peak_bytes": after["peak_bytes"],
        "high_bytes": after["high_bytes"],
        "added_fraction": answer["added_fraction"],
        "alloc_conf": after["alloc_conf"],
        "refused": refused,
    }
    if answer["plan"] and answer["fits"]:
        again = json.loads(
            memplan(job.command("estimate", "--json", "--plan", str(plan)), job.place)[0]
        )
        row |= {f"again_{key}": again[key] for key in ("peak_bytes", "high_bytes")}
        keys = ("peak_bytes", "high_bytes")
        row["over_promise"] = max(again[key] / after[key] for key in keys) - 1
    return row


def nearest(answer: Row) -> Row:
    """Of an answer that says no: how near it comes, with what, and what did not help."""
    after = answer["after"] or answer["before"]
    levers = sorted({lever["kind"] for lever in answer["levers"]})
    return {"high_bytes": after["high_bytes"], "levers": levers, "tried": answer["tried"]}


def for_real(name: str) -> Row:
    """A small job fitted, then run on the CPU with the plan and without. Raises RuntimeError."""
    card, words = REAL[name]
    job = Job(name, "real", card, words)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "job.plan"
        row = fit(job, plan)
        if not row["fits"]:
            raise RuntimeError(f"{name}: does not fit {card}: {row['refused']}")
        parts = json.loads(plan.read_text(encoding="utf-8"))
        part = parts["recompute"]
        # Without a card, what is offloaded is in the memory that is measured.
        beside = parts["offload"]["host_bytes"] if parts["offload"] else 0
        runs = [
            memplan(["run", *more, *words.split(), "--device", "cpu"], measure="1")[0].splitlines()
            for more in ((), ("--plan", str(plan)))
        ]
    losses = [[line for line in lines if "loss" in line] for lines in runs]
    if not losses[0] or len(losses[0]) != len(losses[1]):
        raise RuntimeError(
            f"{name}: {len(losses[0])} losses without the plan, {len(losses[1])} with"
        )
    row["losses"] = len(losses[0])
    row["losses_different"] = sum(a != b for a, b in zip(*losses, strict=True))
    if part and runs[0][-1].startswith("peak "):
        plain, planned = (int(lines[-1].removeprefix("peak ")) for lines in runs)
        promised = part["peak_bytes"] + beside
        row |= {"promised_bytes": promised, "measured_bytes": planned}
        row["measured_plain_bytes"] = plain
    return row


def source() -> str:
    """The tree of `src/`, empty where it differs from what is committed."""

    def git(*words: str) -> str:
        command = ("git", *words)
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return "" if git("status", "--porcelain", "src") else git("rev-parse", "HEAD:src")


def kept(job: Job, current: str | None) -> Row | None:
    """The answer of an earlier run; `current` None takes that of any memplan, a committed one where
    `build/fit` has none."""
    row: Row
    try:
        row = json.loads((KEPT / f"{job.name}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        row = {} if current is not None else known_result("fit").get(job.name, {})
    same = {key: row.get(key) for key in job.what()} == job.what()
    return row if same and (current is None or (current and row.get("source") == current)) else None


def answer(job: Job, current: str) -> Row:
    """Ask, keep what is said, and say it in a line. What has no answer does not fit."""
    KEPT.mkdir(parents=True, exist_ok=True)
    try:
        row = fit(job, KEPT / f"{job.name}.plan")
    except RuntimeError as error:
        row = no_answer(job, str(error))
    row["source"] = current
    (KEPT / f"{job.name}.json").write_text(json.dumps(row, indent=2), encoding="utf-8")
    print(told(job.name, row), flush=True)
    return row


def no_answer(job: Job, why: str) -> Row:
    return {"group": job.group, **job.what(), "fits": False, "exact": False, "error": why}


def told(name: str, row: Row) -> str:
    """A job's answer in a line."""
    if "error" in row:
        return f"{name:20s} no answer: {row['error'].strip().splitlines()[-1]}"
    verdict = "exactly" if row["exact"] else "with rounding" if row["fits"] else "NO"
    over = f", {row['over_promise']:+.2%} when captured again" if "over_promise" in row else ""
    return (
        f"{name:20s} {row['seconds']:6.1f} s  {verdict:13s} {gib(row['plain_high_bytes'])} -> "
        f"{gib(row['high_bytes'])} of {gib(row['card_bytes'])}  +{row['added_fraction']:.1%}, "
        f"{row['captures']} captures, {' '.join(row['levers']) or 'no lever'}{over}"
    )


def gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def summary(rows: dict[str, Row], real: dict[str, Row]) -> Row:
    """What `bench/goals.toml` asks for."""
    answered = [row for row in rows.values() if "error" not in row]
    ran = [row for row in real.values() if "error" not in row]
    measured = [row for row in ran if "measured_bytes" in row]
    held = [row["over_promise"] for row in [*answered, *ran] if "over_promise" in row]
    held += [row["measured_bytes"] / row["promised_bytes"] - 1 for row in measured]
    return {
        "jobs": len(rows),
        "too_large": sum(row["plain_high_bytes"] > row["card_bytes"] for row in answered),
        "fit": sum(row["fits"] for row in rows.values()),
        "exact": sum(row["exact"] for row in rows.values()),
        "captured_again": sum("over_promise" in row for row in answered),
        "worst_over_promise": max(held, default=1.0),
        "real_jobs": sum(bool(row["levers"]) for row in ran),
        "real_measured": len(measured),
        "real_losses_different": sum(row["losses_different"] for row in ran),
    }


def table(rows: dict[str, Row]) -> str:
    """A row for each job, as Markdown."""
    lines = []
    for group, title in GROUPS.items():
        lines += [f"### {title}", "", "| job | card | without | with | levers | time | found in |"]
        lines.append("| --- | --- | --- | --- | --- | --- | --- |")
        for row in (row for row in rows.values() if row["group"] == group):
            words = f"| `{row['job']}` | {row['gpu']} |"
            if "error" in row:
                lines.append(f"{words} | no answer | | | |")
                continue
            fits = "" if row["exact"] else " (rounding)" if row["fits"] else " **does not fit**"
            lines.append(
                f"{words} {gib(row['plain_high_bytes'])} GiB | {gib(row['high_bytes'])} GiB{fits} "
                f"| {', '.join(row['levers'])} | +{row['added_fraction']:.1%} "
                f"| {row['seconds']:.0f} s |"
            )
        lines.append("")
    return "\n".join(lines) + "\n"


def write_table(data: Row) -> None:
    """Into `docs/fit.md`, between its marks. Raises ValueError where it lacks them."""
    s, rows = data["summary"], {name: row for name, row in data.items() if name in read_jobs()}
    head = (
        f"{s['fit']} of {s['jobs']} jobs are made to fit, {s['exact']} of them exactly; captured "
        f"again or run on the CPU, the worst needs {s['worst_over_promise']:+.2%} of its promise.\n"
        "`without` and `with` are high bounds.\n\n"
    )
    write_between(PAGE, BEGIN, END, head + table(rows))


def main() -> int:
    jobs = read_jobs()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="NAME", help="default: what has no answer yet")
    parser.add_argument("--again", action="store_true", help="run all again")
    parser.add_argument("--keep-older", action="store_true", help="answers of older code count too")
    parser.add_argument("--partial", action="store_true", help="write what there is; the rest: no")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="jobs at a time")
    options = parser.parse_args()
    if unknown := set(options.jobs) - set(jobs):
        parser.error(f"no job {', '.join(sorted(unknown))}; there are {', '.join(jobs)}")

    current = source()
    rows: dict[str, Row] = {}
    for name, job in jobs.items():
        if not job.place.is_dir():
            print(f"{name:20s} skipped: there is no {job.place}")
        elif not options.again and name not in options.jobs:
            row = kept(job, None if options.keep_older else current)
            rows |= {name: row} if row else {}
    here = [job for job in jobs.values() if job.place.is_dir()]
    wanted = [job for job in here if job.name in (options.jobs or jobs) and job.name not in rows]
    with ThreadPoolExecutor(options.side_by_side) as pool:
        for job, row in zip(
            wanted, pool.map(lambda job: answer(job, current), wanted), strict=True
        ):
            rows[job.name] = row
    if missing := [job for job in here if job.name not in rows]:
        print(f"{len(missing)} jobs have no answer yet: {' '.join(job.name for job in missing)}")
        if not options.partial:
            return 0
        rows |= {job.name: no_answer(job, "not asked yet") for job in missing}
    real = {}
    for name in REAL:
        try:
            real[name] = for_real(name)
        except RuntimeError as error:
            real[name] = {"error": str(error)}
        print(told(name, real[name]), flush=True)
    ordered = {name: rows[name] for name in jobs if name in rows}
    data = {**ordered, "for_real": real, "summary": summary(ordered, real)}
    print(write_result("fit", data))
    write_table(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
