"""Processes that the job starts: they may prepare data; a GPU of their own cannot be followed.

Only the process that runs the script has the fake device. In another one the first use of CUDA is
reported to the script's process, by way of the sandbox, and ends that process: its work would fail
without a GPU, or be done for real on the CPU.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from memplan.capturing.job.uncounted import UncountedProcesses
from memplan.types.errors import CaptureError

_SECONDS_TO_DIE = 5.0
_MODULE_LEVEL = "<module>"
_EXIT_CODE = 1

_kept: list[Any] = []


class DeviceInOtherProcess(SystemExit):
    """Ends a child that uses CUDA; not an error that the child's own handling would print."""


def end_children(others: Sequence[BaseProcess], uncounted: UncountedProcesses) -> None:
    """End the processes that the script left running (data loader workers), except `others`.

    They are killed while their sandbox still stands: asked politely they would clean up in folders
    that are gone, and this process would wait for them on its way out. For the same reason the
    folder of `multiprocessing` goes now, and not at the end of this process.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for a killed worker
    for child in multiprocessing.active_children():
        if child in others:
            continue
        uncounted.left_running(child)
        child.kill()
        child.join(_SECONDS_TO_DIE)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is util._remove_temp_dir:  # type: ignore[attr-defined]
            finalizer()


def refuse_in_fork(report: Callable[[str], None]) -> None:
    """To be called in a forked child, which has the fake device's answers: the first operator that
    needs the device is refused, by a kernel below all others. A build for CUDA has kernels above
    that one, and asks for the device before it makes the first tensor there."""
    import torch

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        _refuse(report)

    library = torch.library.Library("_", "IMPL")
    library.fallback(refuse, "CUDA")
    _kept.append(library)
    torch.cuda._lazy_init = refuse


def refuse_in_fresh(torch: ModuleType, report: Callable[[str], None]) -> None:
    """To be called in a child started afresh: CUDA seems to be available until it is used."""

    def refusal() -> Callable[..., None]:  # one function under two names is an error of Dynamo's
        return lambda *_args, **_kwargs: _refuse(report)

    # A worker that found no GPU would train on the CPU, for real and to the end.
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda._lazy_init, torch.cuda.set_device = refusal(), refusal()


def _refuse(report: Callable[[str], None]) -> None:
    from memplan.capturing.recording.context import job_frame, source_of

    frame = job_frame(sys._getframe(1))
    if frame is not None:
        report(f"{source_of(frame)}\n{frame.f_code.co_name}")
    raise DeviceInOtherProcess(_EXIT_CODE)


def device_error(reported: str) -> CaptureError:
    """What to tell the user about a use of CUDA in another process."""
    from memplan.types.errors import CaptureError

    place, _, function = reported.partition("\n")
    if function == _MODULE_LEVEL:
        return CaptureError(
            f"{place}: CUDA is used in a worker process, which runs this line again as it imports "
            "the script (it was started with the method 'spawn' or 'forkserver')",
            'put the line under `if __name__ == "__main__":` or into a function; on a real GPU '
            "every worker would take memory for a CUDA context there",
        )
    return CaptureError(
        f"{place}: CUDA is used in a process that the script starts (torch.multiprocessing.spawn, "
        "multiprocessing or fork); only the script's own process can be captured",
        "memplan estimate --world-size N --rank R captures one rank of a job that starts its ranks "
        f"with torch.multiprocessing.spawn; else call the worker function ({function}) directly",
    )
