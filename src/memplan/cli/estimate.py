"""Peak GPU memory of a training script, without a GPU.

The script runs unchanged on fake CUDA: data are real, the model costs no memory, nothing outside
is touched. Options of memplan come before the script; everything after it is the script's own.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memplan.capture.options import CaptureOptions
from memplan.cli.advice import next_command
from memplan.cli.allocator import check_settings, merged, settings_of
from memplan.cli.command import EXIT_NO, EXIT_YES
from memplan.cli.files import output_path, plan_path
from memplan.cli.from_snapshot import explain_snapshot
from memplan.cli.job import Job, add_packages_option, add_rank_options, read_job
from memplan.cli.machine import machine_profile
from memplan.cli.maximize import add_maximize_options, maximize_option
from memplan.cli.signals import ended_by_signal
from memplan.cli.streams import progress_line, stdout_to_stderr, write_json, write_report
from memplan.types.device import DEFAULT_PROFILE, DeviceProfile, find_profile
from memplan.types.errors import UsageError
from memplan.types.plan import CompiledRegion, Plan
from memplan.types.plan_file import load_plan

if TYPE_CHECKING:
    from memplan.types.estimate import Estimate
    from memplan.types.trace import Trace

TAKES_PROGRAM = True
_USAGE = "memplan estimate --gpu 24GiB train.py"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "memplan estimate [options] SCRIPT [ARGS…]\n"
        "       memplan estimate [options] -m MODULE [ARGS…]\n"
        "       memplan estimate [options] torchrun|accelerate launch|srun|… SCRIPT [ARGS…]\n"
        "       memplan estimate [--gpu NAME|SIZE] [--json] --from-snapshot FILE"
    )
    add = parser.add_argument
    add("--gpu", metavar="NAME|SIZE", help="the card: h100, rtx4090, 24GiB, 24GiB:sm90")
    add("--steps", type=_count, metavar="N", help="optimizer steps to run, 0 for forward only")
    add("--routing", choices=("balanced", "worst"), default="balanced",
        help="how data-dependent shapes (mixture of experts) are assumed")  # fmt: skip
    add("--alloc-conf", metavar="CONF", help="as PYTORCH_ALLOC_CONF; its keys win")
    add("--allow-network", action="store_true", help="let the script use the network")
    add_packages_option(parser)
    add_rank_options(parser, several=True)
    add_maximize_options(parser)
    add("--from-snapshot", metavar="FILE",
        help="no script: why the job of a PyTorch memory snapshot ran out of memory")  # fmt: skip
    add("--plan", metavar="PLAN", help="with this plan in effect, as memplan run would have it")
    add("-o", "--output", metavar="TRACE", help="keep the captured trace in this file")
    add("-f", "--force", action="store_true", help="write over an existing file")
    add("--json", action="store_true", help="the answer as JSON on stdout")
    add("-m", metavar="MODULE", help="run a module instead of a script")


def run(args: argparse.Namespace) -> int:
    return ended_by_signal(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.from_snapshot is not None:
        return explain_snapshot(args, find_profile(args.gpu) if args.gpu else None)
    job = read_job(args, _USAGE)
    target = job.launch.target
    script = target.name if target.kind == "script" else ""
    path = output_path(args.output, force=args.force, reads=script) if args.output else None
    named = find_profile(args.gpu) if args.gpu else machine_profile()
    plan = load_plan(plan_path(args.plan)) if args.plan else None
    check_settings(args.alloc_conf, os.environ | job.environment)
    if args.maximize is not None:
        return maximize_option(args, job, named, path)
    if args.multiple_of is not None:
        raise UsageError("--multiple-of without --maximize", "--maximize batch-size")
    if job.rank is None:
        from memplan.cli.ranks import estimate_ranks

        result = estimate_ranks(job, args.own_words, path, force=args.force)
    else:
        result = _estimate_rank(args, job, named, path, plan)
    if args.json:
        write_json(result)
    else:
        _print(result, next_command(result, args.own_words, job.launch.words(), args.output))
    return EXIT_NO if result.fits is False else EXIT_YES


def _estimate_rank(
    args: argparse.Namespace,
    job: Job,
    named: DeviceProfile | None,
    path: Path | None,
    plan: Plan | None,
) -> Estimate:
    from memplan.estimate import estimate

    captured = _capture(args, job, named, path, plan)
    trace = _with_settings(captured, args.alloc_conf, job, plan.alloc_conf if plan else "")
    if path is not None:
        from memplan.types.trace_file import save_trace

        save_trace(trace, path, overwrite=args.force)
    result = estimate(trace, named)
    return msgspec.structs.replace(
        result,
        notes=[*result.notes, *job.notes],
        rank=job.place.rank if job.place else None,
        world_size=job.place.world_size if job.place else None,
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def _capture(
    args: argparse.Namespace,
    job: Job,
    named: DeviceProfile | None,
    path: Path | None,
    plan: Plan | None,
) -> Trace:
    with stdout_to_stderr(), progress_line() as progress:
        progress("starting PyTorch")
        from memplan.capture.script import capture_script

        options = CaptureOptions(
            profile=named or find_profile(DEFAULT_PROFILE),
            steps=args.steps,
            routing=args.routing,
            allow_network=args.allow_network,
            packages=tuple(args.packages),
            place=job.place,
            environment=job.environment,
            progress=progress,
            only_writes=_results(path) if args.own_process else None,
        )
        if plan is None:
            return capture_script(job.target, options)
        from memplan.runtime.in_effect import plan_in_effect

        said: list[str] = []
        regions: list[CompiledRegion] = []
        words = [job.target.name, *job.target.argv]
        in_effect = plan_in_effect(plan, words, said.append, regions.append)
        trace = capture_script(job.target, options, in_effect)
        notes = [*trace.meta.notes, *dict.fromkeys(said)]
        meta = msgspec.structs.replace(trace.meta, notes=notes, regions=regions)
        return replace(trace, meta=meta)


def _results(path: Path | None) -> tuple[Path, ...]:
    """Where this process writes once the capture has begun."""
    return () if path is None else (path.parent,)


def _with_settings(trace: Trace, alloc_conf: str | None, job: Job, planned: str) -> Trace:
    """Key by key the option wins over what the script set, and that over the environment; a plan's
    settings stand where there are no others."""
    _, inherited = settings_of(os.environ | job.environment)
    conf = next(filter(None, (trace.meta.alloc_conf, inherited, planned)), "")
    meta = msgspec.structs.replace(trace.meta, alloc_conf=merged(conf, alloc_conf))
    return replace(trace, meta=meta)


def _print(result: Estimate, hint: str) -> None:
    from memplan.report.terminal import print_estimate

    write_report(lambda console: print_estimate(result, console, next_command=hint))
