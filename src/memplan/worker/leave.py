"""The end of a process that ran a user's program for some steps only."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress


def leave_threads_behind(code: int) -> None:
    """End this process with `code` where threads run for which Python would wait: a program that
    was ended in the middle may never tell them to end."""
    others = set(threading.enumerate()) - {threading.main_thread()}
    if all(thread.daemon for thread in others):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
