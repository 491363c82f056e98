"""What is assumed of the script's other processes: what they take of the card is not counted."""

from __future__ import annotations

import posixpath
import re
import shlex
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from memplan.capturing.known_values.answers import Assumptions
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.recording.context import shown_path, source_of

_LONGEST = 160
_OF_THE_DEVICE = re.compile(r"\b(torch|cuda|jax|tensorflow|cupy|vllm)\b")
_WITHOUT_DEVICE = frozenset(("pip", "venv", "ensurepip", "compileall", "json", "http", "site"))


class UncountedProcesses:
    """What other processes may take of the card while nobody looks: assumptions about them."""

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._started: WeakKeyDictionary[BaseProcess, tuple[str, str]] = WeakKeyDictionary()
        """The script's functions that run in processes of `multiprocessing`, and where."""

    def watch(self, patches: Patches) -> None:
        """Note what processes are started for, until `patches.undo()`."""
        real: Any = BaseProcess.start

        def start(process: Any) -> None:
            function = getattr(process, "_target", None) or type(process).run
            code = getattr(function, "__code__", None)
            place = shown_path(code.co_filename) if code is not None else ""
            if code is not None and place:  # not a data loader's, nor a pool's
                where = f"{place}:{code.co_firstlineno}"
                self._started[process] = function.__name__, where
            real(process)

        patches.set(BaseProcess, "start", start)

    def program(self, command: Sequence[str]) -> None:
        """A program that is about to be started."""
        if may_use_device(command):
            text = shlex.join(command)[:_LONGEST]
            self._add(
                f"`{text}` runs in another process, without a GPU here", source_of(sys._getframe(1))
            )

    def left_running(self, child: BaseProcess) -> None:
        """A process that is about to be ended; one that had used CUDA would have said so."""
        if child in self._started:
            name, where = self._started[child]
            self._add(f"{name} runs in another process, which was ended with the capture", where)

    def used(self, reported: Sequence[str]) -> None:
        """Uses of CUDA, as they were reported."""
        for place in sorted({text.partition("\n")[0] for text in reported}):
            self._add("another process that the script starts uses CUDA too", place)

    def _add(self, what: str, where: str) -> None:
        text = f"{what}; what it takes of the card, its CUDA context included, is not counted"
        self._assumptions.add("process", text, source=where)


def may_use_device(command: Sequence[str]) -> bool:
    """Whether a command starts a Python program whose text speaks of the GPU's libraries."""
    words = list(command)
    if len(words) == 3 and words[1] == "-c" and posixpath.basename(words[0]) in ("sh", "bash"):
        try:
            words = shlex.split(words[2])
        except ValueError:
            return False
    if not words or not posixpath.basename(words[0]).startswith("python"):
        return False
    rest = words[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
        rest.pop(0)
    if len(rest) > 1 and rest[0] == "-c":
        return bool(_OF_THE_DEVICE.search(rest[1]))
    if not rest or rest[0] == "-m":
        return bool(rest[1:]) and rest[1].partition(".")[0] not in _WITHOUT_DEVICE
    if not shown_path(rest[0]):
        return False  # torch's own: it compiles
    try:
        return bool(_OF_THE_DEVICE.search(Path(rest[0]).read_text(errors="replace")))
    except OSError:
        return False
