"""`python -m memplan.worker.tied MODULE ARGS…`: `python -m MODULE ARGS…`, which is told to end
(SIGTERM) as soon as the thread that started it has ended: what is killed can no longer end what it
began. Linux alone tells so; elsewhere the module runs on.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
