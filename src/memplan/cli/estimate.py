"""Peak GPU memory of a training script, without a GPU.

The script runs unchanged on fake CUDA: data are real, the model costs no memory, nothing outside
is touched. Options of memplan come before the script; everything after it is the script's own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.advice import next_command
from memplan.cli.allocator import check_settings
from memplan.cli.calibrate import add_calibration_option, calibrated
from memplan.cli.command import EXIT_NO, EXIT_YES, step_count
from memplan.cli.files import output_path, read_plan
from memplan.cli.from_snapshot import explain_snapshot
from memplan.cli.job import add_capture_options, read_job
from memplan.cli.machine import machine_profile
from memplan.cli.maximize import add_maximize_options, maximize_option
from memplan.cli.rank_files import named_for
from memplan.cli.streams import write_json, write_report
from memplan.types.device import find_profile
from memplan.types.errors import UsageError
from memplan.worker.perform import perform
from memplan.worker.request import Question
from memplan.worker.signals import ended_by_signal
from memplan.worker.streams import progress_line

if TYPE_CHECKING:
    from memplan.types.estimate import Estimate
    from memplan.types.plan import Plan

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
    add_calibration_option(parser)
    add(
        "--steps",
        type=step_count,
        metavar="N",
        help="optimizer steps to run, 0 for forward only",
    )
    add_capture_options(parser)
    add_maximize_options(parser)
    add("--from-snapshot", metavar="FILE",
        help="no script: why the job of a PyTorch memory snapshot ran out of memory")  # fmt: skip
    add("--plan", metavar="PLAN", help="with this plan in effect, as memplan run would have it")
    add("-o", "--output", metavar="TRACE", help="keep the captured trace in this file")
    add("-f", "--force", action="store_true", help="write over an existing file")
    add("--json", action="store_true", help="the answer as JSON on stdout")


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
    named = calibrated(args.calibration, named)
    plans = plans_of_ranks(args.plan, job.world.size if job.world else 1)
    check_settings(args.alloc_conf or "", os.environ | job.environment)
    if args.multiple_of is not None and args.maximize is None:
        raise UsageError("--multiple-of without --maximize", "--maximize batch-size")

    def question(rank: int | None = None) -> Question:
        plan = plans[(job.rank if rank is None else rank) or 0] if plans else None
        return job.question(args, named, rank=rank, plan=plan)

    if args.maximize is not None:
        return maximize_option(args, job, question, path)
    if job.rank is None:
        assert job.world is not None
        result = _estimate_ranks(args, job.world.size, question, path)
    else:
        result = _estimate_rank(args, replace(question(), notes=job.notes), path)
    if args.json:
        write_json(result)
    else:
        _print(result, next_command(result, args.own_words, job.launch.words(), args.output))
    return EXIT_NO if result.fits is False else EXIT_YES


def plans_of_ranks(path: str | None, size: int) -> list[Plan]:
    """The plan of each rank, from its own file where there is one. Empty without a path."""
    if not path:
        return []
    load = cache(read_plan)
    own = [named_for(path, rank) if size > 1 else path for rank in range(size)]
    return [load(name if Path(name).is_file() else path) for name in own]


def _estimate_rank(args: argparse.Namespace, question: Question, path: Path | None) -> Estimate:
    only_writes = () if path is None else (path.parent,)
    trace = perform(question.request, only_writes if args.own_process else None)
    if path is not None:
        from memplan.types.trace_file import save_trace

        save_trace(trace, path, overwrite=args.force)
    return question.answer(trace)


def _estimate_ranks(
    args: argparse.Namespace, size: int, question: Callable[[int], Question], path: Path | None
) -> Estimate:
    """The estimate of the rank that needs most, and its trace in `path`."""
    from memplan.worker.ranks import RankCaptures

    with RankCaptures(size, question) as captures, progress_line(stages=True) as progress:
        captures.capture(progress)
        if path is not None:
            from memplan.types.trace_file import save_trace

            save_trace(captures.trace(), path, overwrite=args.force)
        return captures.answer()


def _print(result: Estimate, hint: str) -> None:
    from memplan.report.terminal import estimate_lines

    write_report(lambda width: estimate_lines(result, width, hint))
