"""What to capture and how; free of torch, so that the command line can build it at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memplan.types.device import DeviceProfile


@dataclass(frozen=True)
class ScriptTarget:
    """A user's program, as `python SCRIPT ARGS…` or `python -m MODULE ARGS…` would run it."""

    kind: Literal["script", "module"]
    name: str
    """Path of the script, or dotted name of the module."""
    argv: tuple[str, ...] = ()
    """The program's own arguments, verbatim; `sys.argv[1:]` of the program."""


@dataclass(frozen=True)
class CaptureOptions:
    """How a capture behaves."""

    profile: DeviceProfile
    """The GPU that the program sees."""
    steps: int | None = None
    """Optimizer steps to run; None stops once the steady step repeats."""
    routing: Literal["balanced", "worst"] = "balanced"
    """Assumption for shapes that depend on data."""
    allow_network: bool = False
    only_writes: tuple[Path, ...] | None = None
    """Directories for the results of a process that captures and then ends: where the kernel can,
    it keeps the process from writing anywhere else, for good. None: the process goes on."""
    progress: Callable[[str], None] | None = None
    """Called with one line of text now and then."""
