"""One case: estimated, and held against what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.megatron.cases import (
    BUILD,
    ENGINE,
    GPUS,
    Golden,
    command,
    counted_apart,
    environment,
    installed,
    sentences_by,
    world_size,
)
from bench.megatron.environment import variables
from bench.megatron.sentences import write_tokenizer
from bench.process import watch

TIMEOUT_SECONDS = 900.0
NEAR = 0.005
_KEPT = ("peak_bytes", "low_bytes", "high_bytes")
_ALLOCATED = ("allocated_peak_bytes", "allocated_low_bytes", "allocated_high_bytes")


def run(golden: Golden, source: Path, *, show: bool = False) -> dict[str, Any]:
    """The result of a case as JSON values."""
    result: dict[str, Any] = {
        "apart": counted_apart(golden),
        "max_allocated": golden.max_allocated,
        "max_allocated_after_step_2": golden.after_step_2,
        "answered": False,
    }
    if result["apart"].startswith("its script"):
        return {**result, "complaint": result["apart"]}
    work = BUILD / "work" / golden.name.replace("/", "_")
    work.mkdir(parents=True, exist_ok=True)
    if (tokenizer := sentences_by(golden.case)) is not None:
        write_tokenizer(work, tokenizer)
    words = [sys.executable, "-m", "memplan", "estimate", "--json", "--gpu", GPUS[golden.card]]
    words += ["--rank", str(world_size(golden.case) - 1)]
    packages = set(installed(golden.case))
    words += [word for name in sorted(packages - {ENGINE}) for word in ("--with", name)]
    words += command(golden.case, source, work)
    try:
        done = watch(
            words,
            cwd=work,
            env={**variables(engine=ENGINE in packages), **environment(golden.case)},
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {**result, "complaint": f"no answer after {TIMEOUT_SECONDS:.0f} s"}
    if show:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
    result |= {
        "exit_code": done.code,
        "seconds": round(done.seconds, 1),
        "host_bytes": done.peak_rss_bytes,
    }
    if done.code not in (0, 3):
        _, _, said = done.stderr.rpartition("memplan: error: ")
        return {**result, "complaint": said.replace(str(BUILD), "…").strip()[:500]}
    return {**result, **compared(golden, json.loads(done.stdout))}


def compared(golden: Golden, answer: dict[str, Any]) -> dict[str, Any]:
    """An answer beside the measured peak of the allocator. `error` is a fraction of it."""
    peak, low, high = (answer[key] for key in _ALLOCATED)
    measured = golden.max_allocated
    return {
        **{key: answer[key] for key in (*_KEPT, *_ALLOCATED)},
        "answered": True,
        "error": round(peak / measured - 1, 5),
        "error_after_step_2": (
            round(peak / golden.after_step_2 - 1, 5) if golden.after_step_2 else None
        ),
        "near": abs(peak / measured - 1) <= NEAR,
        "inside": low <= measured <= high,
        "assumptions": [item["text"] for item in answer.get("assumptions", ())][:8],
    }
