"""Every combination of cards and options of a job: captured, and ranked.

Options of the script and of its launchers are varied with --vary; each combination is captured, and
those that fit are ranked by throughput, or by time or money to a number of samples. A combination
that cannot be is a row that says why. Exit code 3: none fits.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from memplan import __version__
from memplan.cli.calibrate import add_calibration_option, calibrated_cards
from memplan.cli.command import EXIT_NO, EXIT_YES, positive, positive_seconds, step_count
from memplan.cli.job import add_capture_options
from memplan.cli.streams import write_answer, write_json, write_lines
from memplan.types.errors import NoAnswerError, UsageError
from memplan.worker.signals import ended_by_signal
from memplan.worker.streams import progress_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.sweep.answer import Row
    from memplan.sweep.execute import Executor

TAKES_PROGRAM = True
_USAGE = "memplan sweep --gpu h100,a100-80gb --vary batch-size=4,8,16 train.py"
_MOST = 2000


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "memplan sweep --gpu NAME,… --vary OPTION=VALUE,… [options] SCRIPT [ARGS…]\n"
        "       memplan sweep … torchrun|accelerate launch|srun|… SCRIPT [ARGS…]"
    )
    add = parser.add_argument
    add("--gpu", metavar="NAME,…", required=True, help="the cards: h100,a100-80gb")
    add_calibration_option(parser)
    add("--vary", metavar="OPTION=VALUE,…", action="append", default=[],
        help="an option of the script or a launcher, and its values: batch-size=4,8")  # fmt: skip
    add("--fit", action="store_true", help="make those fit that do not, as memplan fit does")
    add("--samples", type=positive, metavar="N", help="rank by the time to so many samples")
    add("--price", metavar="GPU=PRICE/h", action="append", default=[],
        help="with --samples: rank by money; of one GPU: h100=2.5/h")  # fmt: skip
    add("--most", type=positive, metavar="N", default=_MOST, help=f"combinations ({_MOST})")
    add("--jobs", type=positive, metavar="N", help="captures at a time (CPUs, and memory)")
    add("--timeout", type=positive_seconds, metavar="SECONDS",
        help="for each capture or fit; one that takes longer has no answer")  # fmt: skip
    add("--ray", metavar="ADDRESS|auto", help="capture on this Ray cluster")
    add("--steps", type=step_count, metavar="N",
        help="optimizer steps to run in each capture, 0 for forward only")  # fmt: skip
    add_capture_options(parser)
    add("-o", "--output", metavar="FOLDER", help="keep each answer; what is there is not repeated")
    add("--json", action="store_true", help="the answer as JSON on stdout")
    add("--csv", action="store_true", help="the answer as CSV on stdout")


def run(args: argparse.Namespace) -> int:
    return ended_by_signal(lambda: _run(args), answers=True)


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    if args.json and args.csv:
        raise UsageError("--json and --csv contradict each other", "leave one of them out")
    if args.fit and args.steps == 0:
        raise UsageError("--fit with --steps 0: a plan needs a training step", "leave --fit out")
    from memplan.sweep.cards import read_cards, read_prices

    profiles = calibrated_cards(args.calibration, read_cards(args.gpu))
    prices = read_prices(args.price, profiles, args.samples)
    from memplan.cli.sweep_cells import cells_of
    from memplan.sweep.answer import Sweep
    from memplan.sweep.grid import read_dimension
    from memplan.sweep.rank import ranked
    from memplan.sweep.run import run_cells
    from memplan.sweep.store import Store
    from memplan.sweep.text import csv_text, table_lines

    cells = cells_of(args, profiles, [read_dimension(t) for t in args.vary], args.most, _USAGE)
    store = Store(_folder(args.output)) if args.output else None
    with closing(_executor(args)) as executor, progress_line(stages=True) as progress:
        done = run_cells(cells, executor, store, progress)
    rows, by = ranked(cells, done, store, args.samples, prices)
    found = Sweep(
        memplan_version=__version__,
        ranked_by=by,
        complete=done.complete,
        rows=rows,
        captures=done.captures,
        kept=done.kept,
        seconds=time.monotonic() - began,
        notes=_notes(args.samples, rows),
    )
    if args.json:
        write_json(found)
    elif args.csv:
        write_answer(csv_text(found))
    else:
        from rich.text import Text

        write_lines(Text(line) for line in table_lines(found))
    if all(row.high_bytes is None for row in rows):
        raise NoAnswerError("no combination has an answer", "memplan estimate with one of them")
    return EXIT_YES if rows[0].place else EXIT_NO


def _notes(samples: int | None, rows: Sequence[Row]) -> list[str]:
    unknown = sum(bool(row.place) and row.seconds is None for row in rows)
    if samples is None or not unknown:
        return []
    return [
        f"not ranked by the time to {samples:,} samples: how many samples a step takes, or its "
        f"time, is not known of {unknown} combinations; a batch size among the script's options "
        "tells it where no data loader does"
    ]


def _folder(text: str) -> Path:
    folder = Path(text).absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{text} is no folder", "another name after -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{text} cannot be made: {error.strerror}", "another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{text} may not be written to", "another folder")
    return folder


def _executor(args: argparse.Namespace) -> Executor:
    if args.ray is not None:
        from memplan.sweep.ray_cluster import RayCluster

        return RayCluster(args.ray, args.jobs, args.timeout)
    from memplan.sweep.execute import LocalProcesses

    return LocalProcesses(args.jobs, args.timeout)
