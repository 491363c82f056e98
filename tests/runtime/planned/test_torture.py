"""The allocator's library under torture, built with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "native"
SANITIZERS = {"thread": 40_000, "address,undefined": 60_000}
"""And how many random requests and releases."""


def _tool(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


@pytest.fixture(scope="module", params=SANITIZERS, ids=("threads", "memory"))
def torture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    """The program, and how much of it."""
    cmake = _tool("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    folder = tmp_path_factory.mktemp("torture")
    configure = [cmake, "-S", str(NATIVE), "-B", str(folder), "-DMEMPLAN_STRESS=ON"]
    configure += [f"-DMEMPLAN_SANITIZE={request.param}", "-DCMAKE_CXX_FLAGS=-O1"]
    # One compilation a library: the same headers are read once.
    configure += ["-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_BUILD_TYPE=None"]
    build = [cmake, "--build", str(folder), "--parallel", "2", "--target", "memplan_torture"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "memplan_torture", SANITIZERS[request.param]


def _run(program: Path, *arguments: str) -> str:
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_no_byte_has_two_owners_and_all_memory_comes_back(torture: tuple[Path, int]) -> None:
    program, operations = torture
    text = _run(program, str(operations), "1", "4")
    assert "4 threads" in text and " 0 errors" in text


def test_every_call_to_the_driver_may_fail(torture: tuple[Path, int]) -> None:
    program, _ = torture
    assert " 0 errors" in _run(program, "faults")
