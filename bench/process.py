"""Run a command and watch its memory: its own and that of every process it starts. Linux only."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.02
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Run:
    """A finished command.

    Attributes:
        code: its exit code.
        seconds: wall-clock time from start to end.
        peak_rss_bytes: the largest sum of resident bytes over the command and its descendants at
            one poll. Pages that processes share are counted for each of them, so it errs high.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    peak_rss_bytes: int


def watch(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> Run:
    """Run `command` to its end, polling memory every 20 ms.

    Raises subprocess.TimeoutExpired after `timeout` seconds; the command is killed first.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        peak = 0
        try:
            while process.poll() is None:
                if time.perf_counter() - start > timeout:
                    raise subprocess.TimeoutExpired(command, timeout)
                peak = max(peak, tree_rss_bytes(process.pid))
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers too
                process.wait()
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        return Run(process.returncode, out.read(), err.read(), seconds, peak)


def tree_rss_bytes(pid: int) -> int:
    """Resident bytes of a process and all its descendants now; 0 for one that is gone.

    Looks at these processes alone: a walk through all of `/proc` at every poll would slow what is
    being timed.
    """
    total, waiting = 0, [pid]
    while waiting:
        process = f"/proc/{waiting.pop()}"
        try:
            total += int(_words(f"{process}/statm")[1]) * _PAGE
            for thread in os.listdir(f"{process}/task"):  # noqa: PTH208 - half the cost of Path's
                waiting += map(int, _words(f"{process}/task/{thread}/children"))
        except OSError:
            continue  # it ended while we looked
    return total


def _words(path: str) -> list[bytes]:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).split()
    finally:
        os.close(file)
