"""The end of a process that ran a user's program for some steps only."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with `code`, after what is registered with `atexit`.

    Python would wait for threads, which a program that was ended in the middle may never tell to
    end, and look through every object of PyTorch; Triton would write of objects that are alive.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
