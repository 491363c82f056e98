"""Plan where every request of a training step goes, before the job runs.

The script is captured (or a trace is read), its steady step found, and its requests are placed in
one arena with the least height found. Options of memplan come before the script; everything after
it is the script's own.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memplan import __version__
from memplan.capturing.options import STEPS_TO_PLAN
from memplan.cli.command import EXIT_YES, positive_seconds
from memplan.cli.files import input_path, output_path, read_plan
from memplan.cli.job import add_job_options, read_job
from memplan.cli.machine import machine_profile
from memplan.cli.streams import write_answer, write_json
from memplan.types.device import find_profile
from memplan.types.errors import UsageError
from memplan.types.plan_file import save_plan
from memplan.worker.signals import ended_by_signal

if TYPE_CHECKING:
    from memplan.cli.launchers.launch import Launch
    from memplan.layout.static_plan import StaticPlan
    from memplan.types.plan import Plan
    from memplan.types.trace import Trace

TAKES_PROGRAM = True
_USAGE = "memplan plan -o job.plan train.py"
_TIMEOUT = 10.0
_ELLIPSIS = "…"


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `memplan plan`. Sizes are bytes."""

    schema_version: int = 1
    memplan_version: str
    torch_version: str
    gpu: str | None
    plan: str
    """The file that was written."""
    device: int
    """Number of the device; other devices are not planned."""
    arena_bytes: int
    load_bytes: int
    """The most bytes alive at once: no arena is smaller."""
    optimal: bool
    steps: int
    """Optimizer steps of a round."""
    requests: int
    """Requests of setup and round."""
    planned: int
    """Requests with an address."""
    dynamic: int
    """Requests whose size depends on data."""
    spaces: int
    seconds: float


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "memplan plan -o PLAN [options] SCRIPT [ARGS…]\n"
        "       memplan plan -o PLAN [options] torchrun|accelerate launch|srun|… SCRIPT [ARGS…]\n"
        "       memplan plan -o PLAN --from-trace TRACE"
    )
    add = parser.add_argument
    add("-o", "--output", metavar="PLAN", required=True, help="write the plan to this file")
    add("-f", "--force", action="store_true", help="write over an existing file")
    add("--from-trace", metavar="TRACE", help="no script: plan the steady step of this trace")
    add("--plan", metavar="BEFORE",
        help="plan the job as it is with this plan in effect, and keep its parts")  # fmt: skip
    add("--timeout", metavar="S", type=positive_seconds, default=_TIMEOUT,
        help=f"seconds to search, {_TIMEOUT:g} by default")  # fmt: skip
    add("--gpu", metavar="NAME|SIZE", help="the card: h100, rtx4090, 24GiB, 24GiB:sm90")
    add(
        "--steps",
        type=int,
        metavar="N",
        help=f"optimizer steps to capture, {STEPS_TO_PLAN} by default",
    )
    add_job_options(parser, several_ranks=False)
    add("--json", action="store_true", help="the answer as JSON on stdout")
    add("-m", metavar="MODULE", help="plan a module instead of a script")
    parser.set_defaults(packages=(), alloc_conf=None, whole_run=False, scan=None)


def run(args: argparse.Namespace) -> int:
    return ended_by_signal(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    reads = args.from_trace or ""
    path = output_path(args.output, force=args.force, reads=reads)
    before = read_plan(args.plan) if args.plan else None
    if args.from_trace:
        trace = _read(args)
        words = _run_words(trace, args.output)
    else:
        trace, launch = _capture(args, before)
        words = launch.words_below("memplan", "run", "--plan", args.output)
    from memplan.layout.static_plan import plan_of, static_plan

    start = time.monotonic()
    found = static_plan(trace, seconds=args.timeout)
    seconds = time.monotonic() - start
    save_plan(plan_of(trace, found, before), path, overwrite=args.force)
    if args.json:
        write_json(_answer(trace, found, args.output, seconds))
    else:
        write_answer(_text(trace, found, seconds))
        if words:
            write_answer(f"next: {' '.join(map(_quoted, words))}\n")
    return EXIT_YES


def _read(args: argparse.Namespace) -> Trace:
    if args.program is not None or args.m is not None:
        raise UsageError("a script beside --from-trace", "one of the two")
    from memplan.types.trace_file import load_trace

    return load_trace(input_path(args.from_trace))


def _run_words(trace: Trace, plan: str) -> list[str]:
    """How the job of a trace is run with the plan. The trace knows the program, not its launcher;
    empty where it knows neither."""
    if not trace.meta.command:
        return []
    name, *argv = trace.meta.command
    is_script = name.endswith(".py") or Path(name).is_file()
    launcher = ["torchrun", _ELLIPSIS, "-m"] if trace.meta.communicators else []
    words = ["memplan", "run", "--plan", plan, *([] if is_script else ["-m"]), name, *argv]
    return [*launcher, *words]


def _quoted(word: str) -> str:
    return word if word == _ELLIPSIS else shlex.quote(word)


def _capture(args: argparse.Namespace, before: Plan | None) -> tuple[Trace, Launch]:
    """The captured trace and how the job is started."""
    job = read_job(args, _USAGE)
    if args.steps is not None and args.steps < 2:
        raise UsageError(f"--steps {args.steps}: a plan needs steps to compare", "--steps 3")
    from memplan.worker.captures import RankCapture

    args.steps = args.steps or STEPS_TO_PLAN
    profile = find_profile(args.gpu) if args.gpu else machine_profile()
    capture = RankCapture(job.question(args, profile))
    return capture(job.launch.target, before).trace, job.launch


def _answer(trace: Trace, found: StaticPlan, path: str, seconds: float) -> PlanAnswer:
    part = found.part
    return PlanAnswer(
        memplan_version=__version__,
        torch_version=trace.meta.torch_version,
        gpu=trace.meta.gpu or None,
        plan=path,
        device=part.device,
        arena_bytes=part.arena_bytes,
        load_bytes=part.load_bytes,
        optimal=found.proved,
        steps=part.steps,
        requests=part.requests,
        planned=found.planned,
        dynamic=found.dynamic,
        spaces=len(part.spaces),
        seconds=round(seconds, 3),
    )


def _other_devices(trace: Trace, planned: int) -> list[int]:
    """Devices that the job asks too, and the plan leaves alone."""
    import numpy as np

    from memplan.types.trace import EventKind

    asked = np.unique(trace.events.device[trace.events.kind == EventKind.ALLOC])
    return [int(device) for device in asked if device != planned]


def _text(trace: Trace, found: StaticPlan, seconds: float) -> str:
    from memplan.report.text import format_bytes

    part = found.part
    above = part.arena_bytes / max(part.load_bytes, 1) - 1
    quality = "the least possible" if found.proved else f"{above:.2%} above what is alive at once"
    round_ = "one step" if part.steps == 1 else f"{part.steps} steps"
    lines = [
        f"arena {format_bytes(part.arena_bytes)}: {quality}; {found.planned} of "
        f"{part.requests} requests of the start and {round_} have a place ({seconds:.1f} s)"
    ]
    if found.dynamic:
        depend = "depends on data and goes" if found.dynamic == 1 else "depend on data and go"
        spaces = "space" if len(part.spaces) == 1 else "spaces"
        lines.append(
            f"{found.dynamic} {depend} to {len(part.spaces)} reusable {spaces}, or to "
            "PyTorch's own allocator"
        )
    rest = part.requests - found.planned - found.dynamic
    if rest:
        live = "lives" if rest == 1 else "live"
        lines.append(f"{rest} {live} too long for a place that recurs: PyTorch's own allocator")
    if others := _other_devices(trace, part.device):
        names = ", ".join(f"cuda:{device}" for device in others)
        lines.append(
            f"for cuda:{part.device}, which is asked most; {names}: PyTorch's own allocator"
        )
    return "\n".join(lines) + "\n"
