"""`memplan estimate --maximize OPTION`: the largest value of a script's option that fits."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.capture.options import ScriptTarget
from memplan.cli.advice import without
from memplan.cli.command import EXIT_NO, EXIT_YES
from memplan.cli.job import ALL_RANKS, Job
from memplan.cli.streams import progress_line, write_json, write_report
from memplan.types.device import DeviceProfile
from memplan.types.errors import UsageError

if TYPE_CHECKING:
    from memplan.fit.maximum import Maximum

_OPTIONS = ("--maximize", "--multiple-of")


def add_maximize_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--maximize", metavar="OPTION",
        help="the largest value of this option of the script that fits")  # fmt: skip
    add("--multiple-of", type=_positive, metavar="N", help="of --maximize: only multiples of N")


def maximize_option(
    args: argparse.Namespace, job: Job, profile: DeviceProfile | None, path: Path | None
) -> int:
    """Search, and write the answer and the trace of the value that fits; the exit code."""
    from memplan.cli.ranks import words_to_pass_on
    from memplan.fit.child import CaptureFailedError, ChildCapture
    from memplan.fit.maximize import maximize
    from memplan.fit.option_choice import find_option

    if profile is None:
        raise UsageError(
            "no card to fill: this machine has none",
            f"memplan estimate --gpu 24GiB --maximize {args.maximize} …",
        )
    option = find_option(job.launch.target, args.maximize)
    kept = without(words_to_pass_on(args.own_words), *_OPTIONS)
    if job.world is not None:
        kept += [*job.rank_options(), "--rank", ALL_RANKS if job.rank is None else str(job.rank)]
    try:
        with (
            ChildCapture(kept, job.launch.words) as capture,
            progress_line(stages=True) as progress,
        ):
            found = maximize(job.launch.target, option, capture, progress, args.multiple_of)
    except CaptureFailedError as error:
        sys.stderr.write(error.said)  # empty where it has said so itself
        return error.code
    if path is not None:
        from memplan.types.trace_file import save_trace

        save_trace(found.trace, path, overwrite=args.force)
    if args.json:
        write_json(found.answer)
    else:
        _print(found.answer, _next_command(found.answer, args, job))
    return EXIT_YES if found.answer.fits else EXIT_NO


def _next_command(answer: Maximum, args: argparse.Namespace, job: Job) -> str:
    own = without(args.own_words, *_OPTIONS, "-o", "--output")
    name, *argv = answer.command
    words = job.launch.words(ScriptTarget(job.launch.target.kind, name, tuple(argv)))
    return shlex.join(["memplan", "estimate" if answer.fits else "fit", *own, *words])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _print(answer: Maximum, hint: str) -> None:
    from memplan.fit.maximum_text import print_maximum

    write_report(lambda console: print_maximum(answer, console, next_command=hint))
