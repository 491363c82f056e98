"""The allocator's library, as it is installed, and the stand-in driver, built here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from memplan.runtime.planned.library import library_path

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def planned_library() -> Path:
    """libmemplan_planned.so of the installed package."""
    return library_path()


@pytest.fixture(scope="session")
def standin_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libcuda.so.1."""
    path = tmp_path_factory.mktemp("driver") / "libmemplan_standin_cuda.so"
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread",
         str(HERE / "standin_cuda.cpp"), "-o", str(path)],
        check=True,
    )  # fmt: skip
    return path
