"""Run a command and watch its memory: its own and that of every process it starts. Linux only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.results import ROOT

POLL_SECONDS = 0.02
_EXACT_SECONDS = 0.2
"""Between looks at what processes share, at least: the kernel walks through all their pages."""
_REST = 20
"""So many times what such a look took, too: what is watched runs on the same cores."""
_WORTH_A_LOOK = 1.01
"""By how much what is counted more than once has to exceed the peak so far."""
_SIZES = (b"Rss:", b"Pss_Anon:", b"Pss_Shmem:", b"Anonymous:")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Run:
    """A finished command.

    Attributes:
        code: its exit code.
        seconds: wall-clock time from start to end.
        peak_rss_bytes: the most resident bytes of the command and its descendants together. Pages
            that they share after a fork are counted once, and so are files that they map.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    peak_rss_bytes: int


class Running(Protocol):
    """As `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...


def measured_apart(module: str, *words: str) -> Any:
    """What `python -m MODULE WORDS… --out FILE` writes into the file, as JSON: a measurement in a
    process of its own. Raises subprocess.CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run(
            (sys.executable, "-m", module, *words, "--out", str(out)), cwd=ROOT, check=True
        )
        return json.loads(out.read_text(encoding="utf-8"))


def watch(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> Run:
    """Run `command` to its end, polling memory every 20 ms; while there are several processes, what
    they share at most every 200 ms, and not for the last percent of a peak.

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
        try:
            peak = peak_resident(process, timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, timeout) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers too
                process.wait()
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        return Run(process.returncode, out.read(), err.read(), seconds, peak)


def peak_resident(process: Running, timeout: float) -> int:
    """`Run.peak_rss_bytes` of a process, until it ends. Raises TimeoutError after `timeout` s."""
    start = time.perf_counter()
    peak, next_exact = 0, 0.0
    while process.poll() is None:
        now = time.perf_counter()
        if now - start > timeout:
            raise TimeoutError
        resident = resident_in_tree(process.pid)
        most = sum(rss - files for rss, files in resident.values())
        most += max((files for _, files in resident.values()), default=0)
        if len(resident) == 1:
            peak = max(peak, most)
        elif most > peak * _WORTH_A_LOOK and now >= next_exact:
            peak = max(peak, resident_together(resident))
            ended = time.perf_counter()
            next_exact = ended + max(_EXACT_SECONDS, _REST * (ended - now))
        time.sleep(POLL_SECONDS)
    return peak


def resident_in_tree(pid: int) -> dict[int, tuple[int, int]]:
    """Resident bytes of a process and each of its descendants now, without those that are gone: all
    of them, and those that are of files.

    Looks at these processes alone: a walk through all of `/proc` at every poll would slow what is
    being timed.
    """
    found: dict[int, tuple[int, int]] = {}
    waiting = [pid]
    while waiting:
        number = waiting.pop()
        process = f"/proc/{number}"
        try:
            rss, files = map(int, _words(f"{process}/statm")[1:3])
            found[number] = rss * _PAGE, files * _PAGE
            for thread in os.listdir(f"{process}/task"):  # noqa: PTH208 - half the cost of Path's
                waiting += map(int, _words(f"{process}/task/{thread}/children"))
        except OSError:
            continue  # it ended while we looked
    return found


def resident_together(pids: Iterable[int]) -> int:
    """Resident bytes of processes of one family: memory by the share that the kernel gives each
    process (`smaps_rollup`), mapped files as the process with the most of them has them, since
    strangers on the machine map the same libraries."""
    shares, files = 0, 0
    for pid in pids:
        try:
            words = _words(f"/proc/{pid}/smaps_rollup")
        except OSError:
            continue
        size = {name: int(words[at + 1]) * 1024 for at, name in enumerate(words) if name in _SIZES}
        if size:
            shares += size[b"Pss_Anon:"] + size[b"Pss_Shmem:"]
            files = max(files, size[b"Rss:"] - size[b"Anonymous:"])
    return shares + files


def _words(path: str) -> list[bytes]:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).split()
    finally:
        os.close(file)
