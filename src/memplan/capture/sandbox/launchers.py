"""Programs that start the training in another process: that one is to be estimated, not they.

A command line of a package may call a launcher as a function (`trl sft` calls that of Accelerate).
What it starts would train for real on the host, unseen, and perhaps for days.
"""

from __future__ import annotations

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
_LONGEST = 400


def refuse_launch(command: Sequence[str]) -> None:
    """Raises CaptureError where a known launcher is what starts a Python program now."""
    if len(command) < 2 or not posixpath.basename(command[0]).startswith("python"):
        return
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] != "-m":
        words.pop(0)  # the interpreter's own options
    launcher = _launcher()
    if launcher is None or not words:
        return
    module = ("--module",) if words[0] == "-m" else ()
    program = words[1:] if module else words
    text = shlex.join((*launcher, *module, *program))
    raise CaptureError(
        f"the program itself does not train: it starts `{shlex.join(words)[:_LONGEST]}` in another "
        "process",
        f"estimate what it starts: memplan estimate {text[:_LONGEST]}",
    )


def _launcher() -> tuple[str, ...] | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        for prefix, words in _LAUNCHERS.items():
            if name == prefix or name.startswith(prefix + "."):
                return words
        frame = frame.f_back
    return None
