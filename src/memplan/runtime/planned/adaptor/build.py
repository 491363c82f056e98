"""Builds the adaptor, finds one that was built, and puts it before PyTorch's allocator."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from memplan import __version__
from memplan.runtime.planned.library import Library
from memplan.types.errors import InternalError, UsageError

_SOURCE = Path(__file__).with_name("adaptor.cpp")
_HEADER = "c_api.h"
_CUDA_HEADER = "cuda_runtime_api.h"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_MINUTES = 10


def cached(version: str) -> Path:
    """The file of the adaptor for a version of PyTorch."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "memplan" / f"adaptor-{__version__}-torch-{version}.so"


def find() -> Path | None:
    """The adaptor for the installed PyTorch, where it was built."""
    import torch

    path = cached(torch.__version__)
    return path if path.is_file() else None


def command(library: Library, output: Path) -> list[str]:
    """The compiler's. Raises UsageError when the compiler or CUDA's headers are missing."""
    import torch

    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        raise UsageError(f"no C++ compiler {compiler[0]}", "install g++, or name one in CXX")
    root = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    headers = [f"-isystem{folder}" for folder in (root / "include", cuda_headers())]
    # libcudart is PyTorch's, in the process already: another one beside it would be a second state.
    return [
        *compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{_header_folder(library)}",
        *headers,
        str(_SOURCE), "-o", str(output), f"-L{root / 'lib'}", "-lc10_cuda", "-lc10",
    ]  # fmt: skip


def cuda_headers() -> Path:
    """The folder with CUDA's headers: the toolkit's, or that of NVIDIA's packages.

    Raises UsageError when there is none.
    """
    site = Path(sysconfig.get_path("purelib")) / "nvidia"
    named = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    folders = [Path(name) / "include" for name in named if name]
    folders += [Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include"))]
    folders += sorted(site.glob("cu*/include"))
    for folder in folders:
        if (folder / _CUDA_HEADER).is_file():
            return folder
    raise UsageError(
        f"no {_CUDA_HEADER} in {', '.join(map(str, folders))}",
        "install the CUDA toolkit, or name its folder in CUDA_HOME",
    )


def build(library: Library | None = None) -> Path:
    """Build the adaptor for the installed PyTorch; about a minute. Returns where it is.

    Raises UsageError where it cannot be built, with what the compiler says.
    """
    import torch

    if torch.version.cuda is None:
        raise UsageError(
            f"PyTorch {torch.__version__} is built without CUDA", "a CUDA build of PyTorch"
        )
    path = cached(torch.__version__)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        words = command(library or Library(), output)
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=60 * _MINUTES)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"the adaptor was not built: {error}") from error
        if done.returncode:
            raise UsageError(
                f"the adaptor was not built: {shlex.join(words)}\n{done.stderr[-2000:]}",
                "without it the pluggable allocator is used",
            )
        output.replace(path)
    return path


def install(library: Library, path: Path) -> None:
    """Put the adaptor before PyTorch's CUDA allocator, for the rest of the process. What was
    allocated before stays PyTorch's.

    Raises InternalError when it cannot be loaded.
    """
    try:
        adaptor = ctypes.CDLL(str(path))
        failed = adaptor.memplan_adaptor_install(os.fsencode(library.path)) < 0
    except (OSError, AttributeError) as error:
        raise InternalError(
            f"{path} cannot be used: {error}",
            "build it again: python -m memplan.runtime.planned.adaptor",
        ) from error
    if failed:
        raise InternalError(f"{path} does not know the library {library.path}")


def _header_folder(library: Library) -> Path:
    """Installed beside the library; in a checkout, among the sources."""
    folders = [library.path.parent, Path(__file__).parents[5] / "native" / "planned"]
    for folder in folders:
        if (folder / _HEADER).is_file():
            return folder
    raise InternalError(f"no {_HEADER} in {' or '.join(map(str, folders))}")
