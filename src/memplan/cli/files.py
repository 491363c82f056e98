"""Output files: never written over unless asked."""

from __future__ import annotations

from pathlib import Path

from memplan.types.errors import UsageError


def output_path(text: str, *, force: bool) -> Path:
    """The absolute path to write to: the user's program may change the directory meanwhile.

    Raises UsageError when something is there and `force` is not set, or the folder is missing.
    """
    path = Path(text).absolute()
    if path.is_dir():
        raise UsageError(f"-o {text} is a directory", f"-o {path / 'job.trace'}")
    if not path.parent.is_dir():
        raise UsageError(f"-o {text}: {path.parent} does not exist", f"mkdir -p {path.parent}")
    if path.exists() and not force:
        raise UsageError(f"-o {text} exists already", "-f to write over it, or another name")
    return path


def input_path(text: str) -> Path:
    """The path to read. Raises UsageError when no file is there."""
    path = Path(text)
    if path.is_file():
        return path
    what = "is a directory" if path.is_dir() else "does not exist"
    raise UsageError(f"{text} {what}", "memplan estimate -o job.trace SCRIPT writes a trace")
