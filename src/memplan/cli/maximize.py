"""`memplan estimate --maximize OPTION`: the largest value of a script's option that fits."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.capturing.options import ScriptTarget
from memplan.cli.advice import without
from memplan.cli.command import EXIT_NO, EXIT_YES, positive
from memplan.cli.job import Job
from memplan.cli.streams import write_json, write_lines
from memplan.types.errors import UsageError
from memplan.worker.request import Question
from memplan.worker.streams import progress_line

if TYPE_CHECKING:
    from memplan.fit.maximum import Maximum
    from memplan.worker.captures import CaptureProgram

_OPTIONS = ("--maximize", "--multiple-of")


def add_maximize_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--maximize", metavar="OPTION",
        help="the largest value of this option of the script that fits")  # fmt: skip
    add("--multiple-of", type=positive, metavar="N", help="of --maximize: only multiples of N")


def maximize_option(
    args: argparse.Namespace,
    job: Job,
    question: Callable[[int | None], Question],
    path: Path | None,
) -> int:
    """Search, and write the answer and the trace of the value that fits; the exit code.

    `question`: about a rank, or the one in question.
    """
    from memplan.fit.maximize import maximize
    from memplan.fit.option_choice import find_option
    from memplan.worker.captures import RankCapture
    from memplan.worker.ranks import AllRanksCapture

    asked = question(job.rank)
    if asked.profile is None:
        raise UsageError(
            "no card to fill: this machine has none",
            f"memplan estimate --gpu 24GiB --maximize {args.maximize} …",
        )
    option = find_option(job.launch.target, args.maximize)
    with progress_line(stages=True) as progress:
        capture: CaptureProgram = RankCapture(asked)
        if job.world is not None and job.rank is None:
            capture = AllRanksCapture(job.world.size, question, progress)
        found = maximize(job.launch.target, option, capture, progress, args.multiple_of)
    if path is not None:
        from memplan.types.trace_file import save_trace

        save_trace(found.trace, path, overwrite=args.force)
    if args.json:
        write_json(found.answer)
    else:
        from memplan.fit.maximum_text import maximum_lines

        hint = _next_command(found.answer, args, job)
        write_lines(maximum_lines(found.answer, hint))
    return EXIT_YES if found.answer.fits else EXIT_NO


def _next_command(answer: Maximum, args: argparse.Namespace, job: Job) -> str:
    own = without(args.own_words, *_OPTIONS, "-o", "--output")
    name, *argv = answer.command
    words = job.launch.words(ScriptTarget(job.launch.target.kind, name, tuple(argv)))
    return shlex.join(["memplan", "estimate" if answer.fits else "fit", *own, *words])
