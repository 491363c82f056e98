"""Captures and fits on a Ray cluster: each in a process of its own on the node that Ray chooses."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from memplan import __version__
from memplan.sweep.execute import Ended, StoppedError, command, end, timed_out
from memplan.types.errors import UsageError
from memplan.worker.failure import CaptureFailedError
from memplan.worker.request import Outcome
from memplan.worker.streams import stdout_to_stderr

_SECONDS_TO_CONNECT = 10.0
_RETRIES = 2
"""How often a capture whose worker or node was lost is tried again."""


class RayCluster:
    """An `Executor` on the cluster at `address`, or on the one that `auto` finds. `jobs`: by
    default as many at once as the cluster has CPUs. `timeout`: seconds for each.

    The nodes have the same memplan, and the script and its data at the same paths. Raises
    UsageError where Ray is not installed or no cluster answers.
    """

    def __init__(self, address: str, jobs: int | None = None, timeout: float | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise UsageError("--ray: Ray is not installed", "pip install 'memplan[ray]'") from error
        _check_reachable(address)
        self._ray: Any = ray
        self._stack = ExitStack()
        # What Ray has to say of workers it says on stdout, where the answer goes.
        self._stack.enter_context(stdout_to_stderr())
        self._stack.callback(ray.shutdown)
        try:
            with _own_handlers():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            self.close()
            said = str(error).partition("\n")[0]
            raise UsageError(
                f"--ray {address}: {said}", "ray start --head, and --ray auto"
            ) from error
        self._timeout = timeout
        self.jobs = jobs or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        self._there: Any = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run_there)
        self._running: set[Any] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, words: Sequence[str], given: bytes, output: Path) -> Ended:
        with self._lock:
            if self._stopped:
                raise StoppedError
            reference = self._there.remote(
                list(words), given, str(Path.cwd()), __version__, self._timeout
            )
            self._running.add(reference)
        try:
            code, out, wrote, written = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            if self._stopped:
                raise StoppedError from error
            raise CaptureFailedError(_lost(error)) from error
        finally:
            with self._lock:
                self._running.discard(reference)
        if written is not None:
            output.write_bytes(written)
        return Ended(code, out, wrote)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for reference in running:
            self._ray.cancel(reference, force=True)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Ray takes SIGTERM for a crash from its start on, and aborts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes, and then ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # `auto`, or what Ray refuses at once
    try:
        socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(f"--ray {address}: {error}", "HOST:PORT of a cluster, or auto") from error


def _lost(error: Exception) -> Outcome:
    said = str(error).strip().splitlines()[-1].strip()
    message = f"error: Ray gave no answer: {type(error).__name__}: {said}"
    return Outcome(kind="error", exit_code=1, message=message)


def _run_there(
    words: list[str], given: bytes, folder: str, version: str, timeout: float | None
) -> tuple[int, bytes, str, bytes | None]:
    """Run a command on a node: exit code, stdout, stderr, and content of the output file."""
    if version != __version__:
        raise RuntimeError(f"this node has memplan {__version__}, and {version} asks")
    with tempfile.TemporaryDirectory(prefix="memplan-ray-") as temporary:
        output = Path(temporary) / "output"
        process = subprocess.Popen(
            command(words, output),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            start_new_session=True,
        )
        try:
            out, wrote = process.communicate(given, timeout)
        except subprocess.TimeoutExpired as error:
            end([process])
            outcome = timed_out(error.timeout)
            said = f"memplan: {outcome.message}"
            return outcome.exit_code, msgspec.json.encode(outcome), said, None
        except BaseException:  # a task that Ray cancels
            end([process])
            raise
        written = output.read_bytes() if output.exists() else None
        return process.returncode, out, wrote.decode(errors="replace"), written
