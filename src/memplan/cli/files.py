"""Files named on the command line, checked before anything slow begins."""

from __future__ import annotations

from pathlib import Path

from memplan.types.errors import UsageError
from memplan.types.output_file import refuse_existing


def output_path(text: str, *, force: bool) -> Path:
    """The absolute path to write to: the user's program may change the directory meanwhile.

    Raises UsageError when something is there and `force` is not set, or the folder is missing.
    """
    path = Path(text).absolute()
    refuse_existing(path, overwrite=force)
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} does not exist", f"mkdir -p {path.parent}")
    return path


def input_path(text: str) -> Path:
    """The path to read. Raises UsageError when no file is there."""
    path = Path(text)
    if path.is_file():
        return path
    what = "is a folder" if path.is_dir() else "does not exist"
    raise UsageError(f"{text} {what}", "memplan estimate -o job.trace SCRIPT writes a trace")
