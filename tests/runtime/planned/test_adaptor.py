"""The adaptor before PyTorch's own allocator: what can be seen of it without a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from memplan.runtime.planned.adaptor import build, find, install
from memplan.runtime.planned.adaptor.build import cached, command, cuda_headers
from memplan.runtime.planned.library import Library
from memplan.types.errors import InternalError, UsageError

HERE = Path(__file__).parent
ADAPTOR = HERE.parents[2] / "src" / "memplan" / "runtime" / "planned" / "adaptor"


@pytest.fixture
def headers() -> Path:
    try:
        return cuda_headers()
    except UsageError as error:
        pytest.skip(error.message)


def test_it_serves_plans_and_leaves_the_rest_to_pytorchs_allocator(
    planned_library: Path, standin_driver: Path, headers: Path, tmp_path: Path
) -> None:
    root = Path(torch.__file__).parent
    words = command(Library(planned_library), tmp_path / "check")
    # A program, not a library; and what the CPU build of PyTorch has not is in the check.
    words = [word for word in words if word not in ("-shared", "-lc10_cuda", "-fPIC", "-O2")]
    paths = [f"-Wl,-rpath,{folder}" for folder in (root / "lib", planned_library.parent)]
    more = ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", f"-I{ADAPTOR}", *paths]
    done = subprocess.run(
        [*words, *more, str(HERE / "adaptor_check.cpp"), str(planned_library)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = [str(tmp_path / "check"), str(planned_library), str(standin_driver)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr


def test_where_it_is_kept_and_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find() is None
    path = cached(torch.__version__)
    assert path.is_relative_to(tmp_path) and torch.__version__ in path.name
    path.parent.mkdir()
    path.touch()
    assert find() == path


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_without_cuda_there_is_nothing_to_build() -> None:
    with pytest.raises(UsageError, match="built without CUDA"):
        build()


def test_what_is_missing_is_named(
    planned_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(UsageError, match="no-such-compiler"):
        command(Library(planned_library), tmp_path / "out.so")


def test_another_file_is_no_adaptor(planned_library: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-shared", "-x", "c++", "/dev/null", "-o", str(other)], check=True)
    with pytest.raises(InternalError, match="cannot be used"):
        install(Library(planned_library), other)
    with pytest.raises(InternalError, match=r"nothing\.so"):
        install(Library(planned_library), tmp_path / "nothing.so")
