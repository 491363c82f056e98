"""Whether code is of the job or of what is installed for it."""

from __future__ import annotations

import functools
import site
import sysconfig
from pathlib import Path

import torch

_INSTALLED = tuple(
    str(Path(folder).resolve())
    for folder in {
        *site.getsitepackages(),
        *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")),
        str(Path(torch.__file__).parent),
    }
)
PACKAGES = {"site-packages", "dist-packages"}


@functools.cache
def is_installed(file: str) -> bool:
    """Whether it is a library's, wherever that is installed: by `pip install --user`, in another
    environment on the path, or beside torch (`pip install --target`)."""
    path = Path(file).resolve()
    return (
        file.startswith("<frozen")
        or str(path).startswith(_INSTALLED)
        or not PACKAGES.isdisjoint(path.parts)
        or _is_beside_torch(path)
    )


def _is_beside_torch(path: Path) -> bool:
    """In a folder that pip has installed into: it keeps a record of torch there."""
    folder = Path(torch.__file__).resolve().parents[1]
    return folder in path.parents and any(folder.glob("torch-*.dist-info"))
