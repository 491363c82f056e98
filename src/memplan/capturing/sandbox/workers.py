"""Workers that `multiprocessing` starts afresh (spawn, forkserver) join their parent's sandbox.

A forked worker inherits the stand-ins. A fresh one is sent a dictionary to prepare itself with; it
unpickles that before anything of the script, and an entry added here joins it on the way.
"""

from __future__ import annotations

import multiprocessing.spawn as spawn
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memplan
from memplan.capturing.patches.attributes import Patches

_PACKAGE_ROOT = str(Path(memplan.__file__).parent.parent)

_JOIN = """
import sys
sys.path.append({package_root!r})
from memplan.capturing.sandbox import join
join({root!r}, {allow_network!r})
"""


class _Join:
    def __init__(self, root: str, allow_network: bool) -> None:
        self._code = _JOIN.format(
            package_root=_PACKAGE_ROOT, root=root, allow_network=allow_network
        )

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        # Code as text: the worker can not import memplan before its path is set.
        return exec, (self._code,)


def patch_spawn(patches: Patches, root: str, allow_network: bool) -> None:
    """Add the joining entry to what a fresh worker is sent."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = dict(prepare(name))
        data["memplan_sandbox"] = _Join(root, allow_network)
        return data

    patches.set(spawn, "get_preparation_data", get_preparation_data)
