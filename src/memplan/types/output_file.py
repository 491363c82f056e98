"""Writing a file whole or not at all, and never over another one unless told to."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path

from memplan.types.errors import UsageError


def write_file(path: Path, chunks: Iterable[bytes], *, overwrite: bool = False) -> None:
    """Write `chunks` to `path` through a temporary file beside it, renamed once it is complete.

    Raises UsageError when the file exists and `overwrite` is False, or when it cannot be written;
    what was there before then still is.
    """
    path = Path(path)
    refuse_existing(path, overwrite=overwrite)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        try:
            with part.open("xb") as file:
                file.writelines(chunks)
            refuse_existing(path, overwrite=overwrite)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}",
            "choose a folder that exists and that you may write to, with space left",
        ) from error


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise UsageError when writing `path` would destroy something."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "give the name of a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is a device or a pipe, not a file", "give the name of a file")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise UsageError(f"{path} exists", "-f to overwrite it, or another name")
