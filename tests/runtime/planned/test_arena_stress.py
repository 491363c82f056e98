"""The arena's bookkeeping under random jobs, with sanitizers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "native"
PARTS = ("plan", "sequence", "guests", "handover", "arena", "arena_stress")
OPERATIONS = 100_000


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("arena") / "arena_stress"
    sources = [str(NATIVE / "planned" / f"{part}.cpp") for part in PARTS]
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=all", f"-I{NATIVE}", *sources, "-o", str(program)],
        check=True,
    )  # fmt: skip
    return program


def test_no_byte_is_given_out_twice_whatever_plan_and_job_do(stress: Path) -> None:
    done = subprocess.run((stress, str(OPERATIONS), "1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    served = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", done.stdout)}
    assert min(served[what] for what in ("hits", "dynamic", "adopted", "resyncs")) > 400
    assert served["damaged"] > 20
