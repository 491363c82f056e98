"""Files that rank 0 alone writes before the training, and that every rank reads.

An index of a data set, a vocabulary, a cache: rank 0 makes it, all ranks wait, all ranks read.
Where another rank's capture opens a file that is not there, rank 0 is run up to the first module
that it calls (`peers`), and what it has written by then is put into this rank's overlay.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch import distributed

from memplan.capturing.distributed.peers import Peers
from memplan.capturing.known_values.answers import Assumptions
from memplan.types.errors import CaptureError

KEY = "files"
_WRITER = 0
_MOST_BYTES = 1 << 29
"""Larger than what is known at the start of a training; weights are larger."""
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")


def tell_of(peers: Peers, overlay: str) -> None:
    """Answer another rank that asked: the files in a sandbox's overlay, by the names that the
    script knows them by."""
    files: dict[str, bytes] = {}
    left = _MOST_BYTES
    for path in Path(overlay).rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        left -= path.stat().st_size
        if left >= 0:
            files[str(path).removeprefix(overlay)] = path.read_bytes()
    peers.tell(KEY, files)


def supplier(peers: Peers, assumptions: Assumptions) -> Callable[[str], bool]:
    """What to ask when a file is not there: whether it is by now.

    It writes the files of rank 0, so it belongs inside a sandbox. That rank 0 could not be run is
    an assumption.
    """
    process, given = os.getpid(), set[str]()

    def supply(path: str) -> bool:
        path = str(Path(path).absolute())
        if path in given or path.startswith(_SYSTEM) or os.getpid() != process:
            return False
        if peers.link is None or not distributed.is_initialized():
            return False
        if distributed.get_rank() == _WRITER:
            return False
        try:
            files = peers.ask(_WRITER, KEY) or {}
        except CaptureError as error:
            peers.known[KEY] = files = {}
            assumptions.add(
                "rank",
                f"{path} is not there, and whether rank {_WRITER} writes it before could not be "
                f"found out ({error.message}); this rank goes on without",
            )
        if path not in files:
            return False
        for file, content in ((Path(name), files[name]) for name in files):
            given.add(str(file))
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        return True

    return supply
