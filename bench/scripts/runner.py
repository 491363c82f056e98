"""One case: prepared, estimated, and its answer checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.process import watch
from bench.results import ROOT
from bench.scripts.case import Case
from bench.scripts.environment import filled, install, places, prepare, variables

PUBLISHED_TOLERANCE = 0.10
"""Other releases of PyTorch and of the package, other text: closer agreement would be chance."""
_KEPT = ("peak_bytes", "low_bytes", "high_bytes", "allocated_peak_bytes", "fits", "breakdown")


def run(case: Case, *, show: bool = False) -> dict[str, Any]:
    """The result of a case as JSON values; `ok` and `complaints` judge it.

    Raises CannotPrepareError when its packages or data cannot be had.
    """
    install(case.setup)
    prepare(case)
    words = filled(case.argv, places(case))
    folder = Path(*filled((case.cwd,), places(case)))
    command = [sys.executable, "-m", "memplan", "estimate", "--json", "--gpu", case.gpu, *words]
    result: dict[str, Any] = {
        "package": case.package,
        "command": " ".join(filled(case.argv, {})),
        "gpu": case.gpu,
    }
    try:
        done = watch(command, cwd=folder, env=variables(case), timeout=case.timeout_seconds)
    except subprocess.TimeoutExpired:
        complaint = f"no answer after {case.timeout_seconds:.0f} s"
        return {**result, "ok": False, "complaints": [complaint]}
    if show:
        print(done.stdout, done.stderr, sep="\n")
    answer = json.loads(done.stdout) if done.code in (0, 3) else {}
    complaints = _judge(case, done.code, done.stderr, answer)
    references = {"floor": case.floor, "published": case.published}
    return {
        **result,
        **{f"{key}_bytes": found.nbytes for key, found in references.items() if found},
        "exit_code": done.code,
        "seconds": round(done.seconds, 1),
        "host_bytes": done.peak_rss_bytes,
        **{key: answer[key] for key in _KEPT if key in answer},
        "assumptions": len(answer.get("assumptions", ())),
        "ok": not complaints,
        "complaints": complaints,
    }


def _judge(case: Case, code: int, stderr: str, answer: dict[str, Any]) -> list[str]:
    if code not in case.exit_codes:
        _, mark, said = stderr.rpartition("memplan: error: ")
        tail = " / ".join((mark + said).replace(f"{ROOT}/", "").strip().splitlines()[-6:])
        return [f"exit code {code}, expected {case.exit_codes}: {tail}"]
    if case.message not in stderr:
        return [f"stderr does not say {case.message!r}: {stderr.strip()[-500:]}"]
    if not answer:
        return []
    lines = [line for check in case.checks for line in check(answer, places(case)["work"])]
    return lines + against_references(case, answer)


def against_references(case: Case, answer: dict[str, Any]) -> list[str]:
    """Complaints about an answer that its case's floor or published peak contradicts."""
    complaints = []
    peak, allocated = answer["peak_bytes"], answer["allocated_peak_bytes"]
    if case.floor and peak < case.floor.nbytes:
        complaints.append(f"peak {peak:,} bytes, at least {case.floor.nbytes:,} by arithmetic")
    if case.published:
        measured = case.published.nbytes
        if abs(allocated - measured) > PUBLISHED_TOLERANCE * measured:
            complaints.append(f"allocated peak {allocated:,} bytes, published {measured:,}")
    return complaints
