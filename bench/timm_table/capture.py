"""Traces of the table's rows, each captured once in a forked process and kept.

A fork has PyTorch and timm imported already, which is most of a small capture's time. A capture
that fails leaves its message beside where its trace would be.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.results import ROOT
from bench.timm_table.rows import TimmRow
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.types.device import find_profile
from memplan.types.trace_file import save_trace
from memplan.worker.perform import perform
from memplan.worker.request import CaptureRequest

FOLDER = ROOT / "build" / "timm"
SCRIPT = ROOT / "bench" / "timm_table" / "train.py"
GPU = "rtx3090"
CPU_SECONDS = 300


def trace_path(row: TimmRow, folder: Path = FOLDER) -> Path:
    return folder / f"{row.key}.trace"


def request(row: TimmRow, gpu: str = GPU) -> CaptureRequest:
    """The capture of a row's job for a card; rows of any batch size will do."""
    target = ScriptTarget("script", str(SCRIPT), tuple(row.arguments))
    return CaptureRequest(program=target, options=CaptureOptions(profile=find_profile(gpu)))


def capture_all(rows: Iterable[TimmRow], folder: Path = FOLDER) -> Iterator[tuple[str, str]]:
    """Capture what is not there yet, one by one; yields each row's key with what happened."""
    from memplan.capturing.standins.adapters import make_torchvision_importable

    make_torchvision_importable()
    import timm  # noqa: F401

    return captured_once(((row.key, request(row)) for row in rows), folder)


def captured_once(
    asked: Iterable[tuple[str, CaptureRequest]], folder: Path
) -> Iterator[tuple[str, str]]:
    """Capture by key what is not in the folder yet; yields each key with what happened to it."""
    import memplan.capturing.script  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    for key, one in asked:
        path = folder / f"{key}.trace"
        failure = path.with_suffix(".failed")
        if path.exists() or failure.exists():
            yield key, "there" if path.exists() else "failed before"
            continue
        start = time.perf_counter()
        _in_a_fork(one, path, failure)
        seconds = time.perf_counter() - start
        yield key, f"{seconds:.1f} s" if path.exists() else f"failed in {seconds:.1f} s"


def _in_a_fork(asked: CaptureRequest, path: Path, failure: Path) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        if not path.exists() and not failure.exists():
            failure.write_text("its process was ended\n", encoding="utf-8")
        return
    code = 1
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        save_trace(perform(asked, only_writes=(path.parent,)), path, overwrite=True)
        code = 0
    except BaseException:  # a fork must not go on with its parent's work
        failure.write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        sys.stdout.flush()
        os._exit(code)
