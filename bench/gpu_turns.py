"""Whose turn it is on the GPU, where several measuring processes run at the same time.

All of a step's surroundings (imports, captures, compiling, the first steps) may overlap with other
processes; what is timed must be alone on the card. `FOLDER` names a folder with two lock files:
whoever uses the card holds `room` together with others or alone, and waits for it within `gate`, so
that one who wants to be alone is not overtaken for ever. Without the variable nobody waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

FOLDER = "MEMPLAN_BENCH_TURNS"
_held: list[IO[str]] = []


def share_from_first_use() -> None:
    """This process uses the card together with others, from the moment it first touches it to its
    end or until `be_alone`."""
    if FOLDER not in os.environ:
        return
    import torch  # who only waits for a turn does without

    initialise: Callable[[], None] = torch.cuda._lazy_init

    def first() -> None:
        torch.cuda._lazy_init = initialise
        if not _held:
            _held.append(_enter(fcntl.LOCK_SH))
        initialise()

    torch.cuda._lazy_init = first


def be_alone() -> None:
    """Nobody else uses the card from here to the end of this process."""
    if FOLDER in os.environ:
        _leave()
        _held.append(_enter(fcntl.LOCK_EX))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, nobody else uses the card."""
    be_alone()
    try:
        yield
    finally:
        _leave()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Inside, nobody is alone on the card."""
    if FOLDER in os.environ:
        _held.append(_enter(fcntl.LOCK_SH))
    try:
        yield
    finally:
        _leave()


def _enter(how: int) -> IO[str]:
    folder = Path(os.environ[FOLDER])
    room = (folder / "room").open("w", encoding="utf-8")
    with (folder / "gate").open("w", encoding="utf-8") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, how)
    return room


def _leave() -> None:
    while _held:
        _held.pop().close()
