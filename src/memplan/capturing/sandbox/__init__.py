"""Runs a script so that nothing outside is touched, while to the script everything happened.

Files that it writes go to a scratch directory and are read back from there; connections that would
leave this machine are refused; programs that it starts are held by the kernel; what it changed
about the process is put back. `docs/sandbox.md` says what is covered and what is not.
"""

from __future__ import annotations

from memplan.capturing.sandbox.confine import lockdown
from memplan.capturing.sandbox.session import Sandbox, join, overlay, report_device

__all__ = ["Sandbox", "join", "lockdown", "overlay", "report_device"]
