"""Files named on the command line, checked before anything slow begins."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.types.errors import UsageError
from memplan.types.output_file import refuse_existing

if TYPE_CHECKING:
    from memplan.types.plan import Plan

_LONGEST_SHOWN = 80
_BEGINNING = 4096
"""Bytes that tell JSON from a trace."""


def output_path(text: str, *, force: bool, reads: str = "") -> Path:
    """The absolute path to write to: the user's program may change the directory meanwhile.

    Raises UsageError when something is there and `force` is not set, when it is the file `reads`
    that the command reads, or when the folder is missing or may not be written to.
    """
    path = _named(text).absolute()
    if reads and path.exists() and Path(reads).exists() and path.samefile(reads):
        raise UsageError(f"{text} is what this command reads", "another name after -o")
    refuse_existing(path, overwrite=force)
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} does not exist", f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path.parent} may not be written to", "another folder")
    return path


def input_path(
    text: str, *, made_by: str = "memplan estimate -o job.trace SCRIPT writes a trace"
) -> Path:
    """The path to read. Raises UsageError when no file is there, with how one is made."""
    path = _named(text)
    if path.is_file():
        return path
    what = "is a folder" if path.is_dir() else "does not exist"
    if path.exists() and not path.is_dir():
        what = "is not a regular file"
    raise UsageError(f"{text} {what}", made_by)


def is_json(path: Path) -> bool:
    """Whether the file begins as a JSON object does."""
    with path.open("rb") as file:
        return file.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")


def _named(text: str) -> Path:
    """The path, if there can be one of this name. Raises UsageError."""
    path = Path(text)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path
    except (OSError, ValueError) as error:
        shown = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{shown!r} cannot be a file: {why}") from error
    return path


def read_plan(text: str) -> Plan:
    """The plan of that file. Raises UsageError when no file is there, or its allocator settings are
    such as PyTorch would refuse, and what `load_plan` raises."""
    from memplan.types.plan_file import load_plan

    path = input_path(text, made_by="memplan fit -o job.plan SCRIPT writes a plan")
    plan = load_plan(path)
    if plan.alloc_conf:
        from memplan.simulate import AllocatorSettings

        try:
            AllocatorSettings.parse(plan.alloc_conf)
        except UsageError as error:
            raise UsageError(f"{text}: {error.message}", error.hint) from error
    return plan
