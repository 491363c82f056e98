"""Runs a user's own program, unchanged, on the fake device."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.spawn import ProcessException

from memplan.capturing.cuda import nvidia_smi
from memplan.capturing.distributed import files, peers
from memplan.capturing.enough import EnoughSeen, ended_whatever_it_catches
from memplan.capturing.job.caught import memplan_cause
from memplan.capturing.job.descendants import Descendants, adopting
from memplan.capturing.job.faults import (
    DOWNLOADS,
    beginning,
    hint_of,
    place_of,
    short_message,
)
from memplan.capturing.job.oom_handlers import oom_note
from memplan.capturing.job.other_processes import device_error, end_children
from memplan.capturing.job.run import exit_with, run_program
from memplan.capturing.job.uncounted import UncountedProcesses
from memplan.capturing.options import OUR_OPTIONS, CaptureOptions, ScriptTarget
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.recording.context import shown_path
from memplan.capturing.sandbox import Sandbox, lockdown
from memplan.capturing.session import CaptureSession
from memplan.types.errors import CaptureError, MemplanError, UsageError
from memplan.types.trace import Trace

_TOLD_BY_LAUNCHERS = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"}
)
"""Environment variables without which a launched script does not run by itself."""


def capture_script(
    target: ScriptTarget,
    options: CaptureOptions,
    within: AbstractContextManager[object] | None = None,
    *,
    only_writes: tuple[Path, ...] | None = None,
) -> Trace:
    """Run `target` until nothing new is to be expected, and return its trace. `within` is entered
    around the program. `only_writes`: directories for the results of a process that captures and
    then ends: where the kernel can, it keeps the process from writing anywhere else, for good;
    None: the process goes on.

    Raises UsageError when the program cannot be found or refuses its arguments, and CaptureError
    when it fails, never steps an optimizer or asks nothing of the device.
    """
    with peers.peers(target, options, partial(capture_script, only_writes=())):
        return _capture(target, options, within, only_writes)


def _capture(
    target: ScriptTarget,
    options: CaptureOptions,
    within: AbstractContextManager[object] | None,
    only_writes: tuple[Path, ...] | None,
) -> Trace:
    session = CaptureSession(options)
    uncounted = UncountedProcesses(session.state.assumptions)
    box = Sandbox(
        allow_network=options.allow_network,
        on_note=session.notes.append,
        on_program=uncounted.program,
        is_fake=lambda tensor: isinstance(tensor, FakeTensor),
        new_tensor=session.new_tensor,
    )
    elsewhere: list[str] = []
    others: list[BaseProcess] = list(multiprocessing.active_children())
    started = Descendants()
    watched = Patches()
    argv_before, path_before = sys.argv, list(sys.path)
    main_before = sys.modules["__main__"]
    try:
        with adopting(), box:
            uncounted.watch(watched)
            watched.set(os, "_exit", exit_with(os._exit))
            place = options.place
            nvidia_smi.install(
                Path(f"{box.scratch}/tmp/bin"),
                options.profile,
                1 if place is None else place.local_world_size,
            )
            if only_writes is not None:
                lockdown(str(box.scratch), map(str, only_writes))
            box.supply(files.supplier(peers.current(), session.state.assumptions))
            try:
                with session, within or nullcontext():
                    try:
                        with ended_whatever_it_catches():
                            _run(target)
                    finally:
                        end_children(others, uncounted)
                        elsewhere = box.device_uses
                        started.end()
                        session.notes += oom_note(target)  # while its folder is on the path
            finally:
                session.time_input()
    except EnoughSeen:
        pass
    except BaseException as error:
        _judge_end(error, session, target, elsewhere, box.refused)
    finally:
        watched.undo()
        sys.argv, sys.path[:] = argv_before, path_before
        sys.modules["__main__"] = main_before
    if peers.current().over:
        raise EnoughSeen
    uncounted.used(elsewhere)
    trace = session.trace([target.name, *target.argv])
    if elsewhere and trace.meta.optimizer_steps == 0:
        raise device_error(elsewhere[0])
    _check_content(trace, target, trains=options.steps != 0 and not session.steps.only_gradients)
    return trace


def _judge_end(
    error: BaseException,
    session: CaptureSession,
    target: ScriptTarget,
    elsewhere: list[str],
    refused: list[str],
) -> None:
    """What ended the program: raises what it means, unless its training had been seen."""
    stop = error if isinstance(error, SystemExit) else None
    if stop is not None and stop.code in (None, 0):
        return
    cause = memplan_cause(error)
    ended = session.ending.draining and isinstance(cause, CaptureError)
    if cause is error and not ended:
        raise error
    if cause is not None and not ended:
        raise cause from error
    if isinstance(error, KeyboardInterrupt):
        raise error
    if elsewhere:
        raise device_error(elsewhere[0]) from error
    reported = error.__context__ if isinstance(error.__context__, Exception) else None
    if session.ending.later.begun:
        session.ending.cut_off()
        return
    if session.ending.draining:
        _assume_nothing_follows(session, cause or (stop and reported) or error, target)
    elif stop is not None:
        raise _stopped(stop, reported, target, session.options, refused) from stop
    else:
        raise _script_failed(error, target, session.options, refused) from error


def _run(target: ScriptTarget) -> None:
    if target.kind == "script" and not Path(target.name).is_file():
        raise UsageError(f"{target.name}: no such script", "check the path")
    run_program(target.kind, target.name, tuple(target.argv))


def _stopped(
    stop: SystemExit,
    reported: Exception | None,
    target: ScriptTarget,
    options: CaptureOptions,
    refused: list[str],
) -> MemplanError:
    """What to say of an exit code. `reported` is the error that it stands for: Hydra and others
    print what the script raised, and exit."""
    if stop.code == 2:
        ours = next((w for w in target.argv if w.partition("=")[0] in OUR_OPTIONS), None)
        if ours:
            hint = (
                f"options of memplan before the script: memplan estimate {ours} … {target.name} …"
            )
        elif target.argv:
            start = "-m " if target.kind == "module" else ""
            hint = f"python {start}{target.name} --help, which may list them"
        else:
            hint = f"its own arguments after its name: memplan estimate {target.name} …"
        return UsageError(
            f"{target.name} ended with exit code 2, as scripts do that refuse their arguments", hint
        )
    if reported is not None:
        return _script_failed(reported, target, options, refused)
    code = stop.code if isinstance(stop.code, int) else f"1: {beginning(str(stop.code))}"
    return CaptureError(
        f"{target.name} stopped before its first steps were seen, with exit code {code}"
        + (f" (it wanted to reach {', '.join(refused[:3])})" if refused else ""),
        DOWNLOADS if refused else f"check that it starts: python {target.name}",
    )


def _script_failed(
    error: BaseException, target: ScriptTarget, options: CaptureOptions, refused: list[str]
) -> CaptureError:
    where = place_of(error) or target.name
    detail = short_message(error)
    if isinstance(error, SyntaxError) and error.lineno and Path(error.filename or "").is_file():
        place = f"{shown_path(str(error.filename))}:{error.lineno}"
        return CaptureError(
            f"{place}: {type(error).__name__}: {error.msg}",
            f"python -m py_compile {error.filename} shows the place",
        )
    if isinstance(error, ProcessException):
        return CaptureError(
            f"{where}: a process started by torch.multiprocessing failed: "
            f"{detail.strip().splitlines()[-1]}",
            "when estimating, call the worker function directly, with rank 0 and a world size of "
            "1: only the script's own process can be captured",
        )
    if isinstance(error, KeyError) and str(error).strip("'") in _TOLD_BY_LAUNCHERS:
        return CaptureError(
            f"{where}: the script asked for {str(error).strip(chr(39))}, which a launcher sets",
            f"memplan estimate torchrun --nproc-per-node N {target.name}, or "
            f"memplan estimate --world-size N --rank R {target.name}",
        )
    if refused:
        return CaptureError(
            f"{where}: the script raised {type(error).__name__}: {detail} (it wanted to reach "
            f"{', '.join(refused[:3])}, and memplan keeps it off the network)",
            DOWNLOADS,
        )
    sender = peers.current().failure
    return CaptureError(
        f"{where}: the script raised {type(error).__name__}: {detail}",
        sender if sender and detail not in sender else hint_of(error, target.name, options),
    )


def _assume_nothing_follows(
    session: CaptureSession, error: BaseException, target: ScriptTarget
) -> None:
    """The training was seen, and then its data loaders ran dry or its loop ended: a script that
    counts what they gave may well stumble over it. Or what follows cannot be captured."""
    session.caught.not_caught(error)
    ours = isinstance(error, MemplanError)
    what = "could not be followed" if ours else f"raised {type(error).__name__}"
    session.state.assumptions.add(
        "ending",
        f"after its training was cut short the script {what}: {short_message(error)}; "
        "what comes after that was not seen and is taken to need no more",
        source=place_of(error) or target.name,
    )


def _check_content(trace: Trace, target: ScriptTarget, *, trains: bool) -> None:
    if not (trace.events.bytes > 0).any():
        raise CaptureError(
            f"{target.name} ended without asking for GPU memory",
            "if it runs on the CPU only, choose the GPU in the script, for example with its "
            "--device option; if it stopped early, see what it printed",
        )
    if trains and trace.meta.optimizer_steps == 0:
        raise CaptureError(
            f"{target.name} ended without a single optimizer step",
            "a script that trains, or memplan estimate --steps 0 for one that only runs forward",
        )
