"""The planned allocator in a process: `memplan.install(plan)`, `with memplan.planned(plan):`."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from memplan.runtime import nvml
from memplan.runtime.planned import adaptor, pluggable
from memplan.runtime.planned.job import Job
from memplan.runtime.planned.library import Library
from memplan.runtime.planned.outcome import outcome
from memplan.runtime.planned.recording import observed_meta
from memplan.runtime.planned.refusals import Refusals, check_settings
from memplan.runtime.planned.statistics import MemoryFunctions
from memplan.types.alloc_conf import conf_in
from memplan.types.errors import UsageError
from memplan.types.plan import Plan
from memplan.types.plan_file import load_plan

Say = Callable[[str], None]


class PlannedRun:
    """A job being served; nothing where the planned allocator cannot be used.

    `close()`, or leaving it as a context manager, ends the plan and the recording. The allocator
    itself stays for the life of the process and goes on as PyTorch's own would.
    """

    def __init__(self, job: Job | None = None, stack: ExitStack | None = None) -> None:
        self.job = job
        self._stack = stack or ExitStack()

    @property
    def active(self) -> bool:
        """Whether the planned allocator serves this process."""
        return self.job is not None

    def stats(self) -> dict[str, Any]:
        """What `memplan run --stats` writes; empty when not `active`."""
        return msgspec.to_builtins(outcome(self.job)) if self.job is not None else {}

    def close(self) -> None:
        self._stack.close()
        if self.job is not None:
            self.job.unload()

    def __enter__(self) -> PlannedRun:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class _Process:
    """What is there once in a process: an allocator is installed for good."""

    library: Library | None = None
    pluggable_used = False
    running: PlannedRun | None = None


def install(plan: Plan | Path | str | None = None) -> PlannedRun:
    """From now on the planned allocator serves this process's CUDA memory.

    `plan`: a plan with an allocation part, or its file; None: the first steps are recorded and
    planned in the background, and the plan comes into effect between two steps. Where it cannot be
    used (no GPU, a plan larger than the card) a warning says so and PyTorch's own goes on.

    Raises UsageError when CUDA is already initialised, when the environment asks for expandable
    segments or another allocator, or for a plan without an allocation part; FormatError for a
    damaged file.
    """
    return start(_read(plan), say=_warn)


@contextmanager
def planned(plan: Plan | Path | str | None = None) -> Iterator[PlannedRun]:
    """`install(plan)` for a block. The allocator stays when it ends, the plan does not; a later
    block may bring another."""
    running = install(plan)
    try:
        yield running
    finally:
        running.close()


def _read(plan: Plan | Path | str | None) -> Plan | None:
    found = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    if found is not None and found.allocation is None:
        raise UsageError("the plan has no allocation part", "memplan plan -o PLAN SCRIPT makes one")
    return found


def start(
    plan: Plan | None, *, command: list[str] | None = None, record_all: bool = False, say: Say
) -> PlannedRun:
    """Take the process over, if it has a GPU, and follow the job that it runs.

    `command`: the job's words. `say` gets sentences for people. Raises as `install` does.
    """
    if plan is not None:
        compare(plan, command, say)
    if reason := pluggable.why_not():
        say(f"{reason}: PyTorch's ordinary allocator serves the job")
        return PlannedRun()
    if _Process.running is not None:
        raise UsageError("a job is already being served in this process", "close() the first")
    conf = conf_in(os.environ)
    library, pluggable_used = _taken_over(conf)
    meta = observed_meta(command or sys.argv[:1], torch.__version__, "", conf)
    job = Job(
        library,
        job_devices(),
        meta,
        plan=plan.allocation if plan is not None else None,
        record_all=record_all,
        card_bytes=nvml.total_bytes(),
        say=say,
    )
    return follow(job, pluggable_used=pluggable_used)


def follow(job: Job, *, pluggable_used: bool = True) -> PlannedRun:
    """Follow a job that the library already serves. Where it does so without PyTorch's own
    allocator behind it, functions of PyTorch are replaced and refused."""
    stack = ExitStack()
    running = PlannedRun(job, stack)
    _Process.running = running
    stack.callback(_forget)
    if pluggable_used:
        stack.enter_context(MemoryFunctions(job.library, job.peaks, job.devices))
        stack.enter_context(Refusals(job.say))
    stack.enter_context(job)
    return running


def _forget() -> None:
    _Process.running = None


def _taken_over(conf: str) -> tuple[Library, bool]:
    """The library under PyTorch, and whether as its pluggable allocator: the adaptor, where one was
    built, is better."""
    if _Process.library is None:
        path = adaptor.find()
        library = Library()
        if path is not None:
            adaptor.install(library, path)
        else:
            check_settings(conf)
            pluggable.check_not_started()
            pluggable.use(library)
        _Process.library, _Process.pluggable_used = library, path is None
    return _Process.library, _Process.pluggable_used


def job_devices() -> list[int]:
    """The devices that the job of this process may use: under a launcher that of its rank."""
    count = torch.cuda.device_count()
    rank = os.environ.get("LOCAL_RANK", "")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and rank.isdecimal():
        return [int(rank) if int(rank) < count else 0]
    return list(range(count))


def compare(plan: Plan, command: list[str] | None, say: Say) -> None:
    """Say what the plan was made for and this job is not."""
    made_from, placed = plan.made_from, plan.allocation is not None
    release = made_from.torch_version.partition("+")[0]  # of whatever build: plans come from others
    if release not in ("", torch.__version__.partition("+")[0]):
        told = "; the hit rate will tell" if placed else ""
        say(
            f"the plan was made with PyTorch {made_from.torch_version}, this is "
            f"{torch.__version__}: requests may differ{told}"
        )
    ranks = int(os.environ.get("WORLD_SIZE") or 0)  # not every launcher says so
    if made_from.ranks != ranks and made_from.ranks and ranks:
        say(
            f"the plan was made for {made_from.ranks} ranks and this job has {ranks}: a rank may "
            "need more than the plan promises"
        )
    if made_from.command and command and _job(made_from.command) != _job(command):
        then = (
            "requests go to the ordinary allocator until the job is planned again"
            if placed
            else "the peak may be higher than the plan promises"
        )
        say(f"the plan was made for {shlex.join(made_from.command)}: where sizes differ, {then}")


def _job(command: list[str]) -> list[str]:
    """Wherever the script lies."""
    return [Path(command[0]).name, *command[1:]]


def _warn(text: str) -> None:
    warnings.warn(f"memplan: {text}", stacklevel=3)
