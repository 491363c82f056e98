"""Builds the stand-alone stress programs of `native/` with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[1] / "native"


def build_stress(target: str, sanitizers: str, folder: Path, *, optimize: str = "-O1") -> Path:
    """The program, with `sanitizers` as CMake's MEMPLAN_SANITIZE has them; skips without CMake."""
    cmake = _tool("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    configure = [cmake, "-S", str(NATIVE), "-B", str(folder), "-DMEMPLAN_STRESS=ON"]
    configure += [f"-DMEMPLAN_SANITIZE={sanitizers}", f"-DCMAKE_CXX_FLAGS={optimize}"]
    # One compilation a library: the same headers are read once.
    configure += ["-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_BUILD_TYPE=None"]
    build = [cmake, "--build", str(folder), "--parallel", "2", "--target", target]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / target


def run_stress(program: Path, *arguments: str) -> str:
    """What it prints; it must find nothing."""
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _tool(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)
