"""Programs that start the training in another process: that one is to be estimated, not they.

A command line of a package may call a launcher as a function (`trl sft` calls that of Accelerate).
What it starts would train for real on the host, unseen, and perhaps for days. A Trainer of
Lightning on several devices is rank 0 itself and starts the program again for the others.
"""

from __future__ import annotations

import os
import posixpath
import shlex
import sys
from collections.abc import Sequence
from types import FrameType

from memplan.types.errors import CaptureError

_LAUNCHERS = {
    "accelerate.commands.launch": ("accelerate", "launch"),
    "torch.distributed.run": ("torchrun",),
    "torch.distributed.elastic": ("torchrun",),
    "deepspeed.launcher": ("deepspeed",),
}
_STARTS_ITSELF = tuple(
    f"{package}.strategies.launchers.subprocess_script"
    for package in (
        "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric",
    )
)  # fmt: skip
"""Run the program once more for each other rank, which they tell by `LOCAL_RANK`."""
_LONGEST = 400


def refuse_launch(command: Sequence[str]) -> None:
    """Raises CaptureError where a known launcher is what starts a Python program now."""
    if len(command) < 2 or not posixpath.basename(command[0]).startswith("python"):
        return
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] != "-m":
        words.pop(0)  # the interpreter's own options
    caller = _caller((*_LAUNCHERS, *_STARTS_ITSELF))
    if caller is None or not words:
        return
    what = f"`{shlex.join(words)[:_LONGEST]}` in another process"
    if caller in _STARTS_ITSELF:
        ranks = os.environ.get("WORLD_SIZE", "N")
        raise CaptureError(
            f"the program starts its other ranks itself: {what}",
            "estimate it as one of them: "
            f"memplan estimate --world-size {ranks} {shlex.join(words)[:_LONGEST]}",
        )
    module = ("--module",) if words[0] == "-m" else ()
    program = words[1:] if module else words
    text = shlex.join((*_LAUNCHERS[caller], *module, *program))
    raise CaptureError(
        f"the program itself does not train: it starts {what}",
        f"estimate what it starts: memplan estimate {text[:_LONGEST]}",
    )


def _caller(modules: Sequence[str]) -> str | None:
    """The first of the modules, or of their packages, that is calling now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        for prefix in modules:
            if name == prefix or name.startswith(prefix + "."):
                return prefix
        frame = frame.f_back
    return None
