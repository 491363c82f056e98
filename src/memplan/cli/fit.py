"""Make a training script fit a card, at the least added time.

Where the estimate does not fit, looks for what to drop and recompute, captures the script again
with that plan in effect, and keeps the cheapest plan that fits. Options of memplan come before the
script; everything after it is the script's own.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memplan.capturing.options import ScriptTarget
from memplan.cli.allocator import check_settings
from memplan.cli.calibrate import add_calibration_option, calibrated
from memplan.cli.command import EXIT_NO, EXIT_YES
from memplan.cli.files import output_path
from memplan.cli.job import ALL_RANKS, Job, add_capture_options, read_job
from memplan.cli.machine import machine_profile
from memplan.cli.streams import write_json, write_lines
from memplan.types.device import find_profile, parse_size
from memplan.types.errors import UsageError
from memplan.worker.signals import ended_by_signal, raise_second_interrupt
from memplan.worker.streams import progress_line

if TYPE_CHECKING:
    from memplan.cli.launchers.launch import Launch
    from memplan.fit.answer import Fit
    from memplan.fit.flow import Fitted
    from memplan.types.device import DeviceProfile
    from memplan.types.estimate import Estimate
    from memplan.worker.pool import Workers
    from memplan.worker.request import Question

TAKES_PROGRAM = True
_USAGE = "memplan fit --gpu 24GiB -o job.plan train.py"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "memplan fit [options] SCRIPT [ARGS…]\n       memplan fit [options] -m MODULE [ARGS…]\n"
        "       memplan fit [options] torchrun|accelerate launch|srun|… SCRIPT [ARGS…]"
    )
    add = parser.add_argument
    add("--gpu", metavar="NAME|SIZE", help="the card: h100, rtx4090, 24GiB, 24GiB:sm90")
    add_calibration_option(parser)
    add("--steps", type=int, metavar="N", help="optimizer steps to run in each capture")
    add("--allow", choices=("exact", "rounding", "numbers"), default="exact",
        help="what levers may do to the job's numbers: nothing (the default), another order of "
        "sums, or more")  # fmt: skip
    add("--at-most", metavar="PERCENT", type=_fraction,
        help="the most that a plan may add to a step's time: 5%%")  # fmt: skip
    add("--frontier", action="store_true", help="peak against time: a row of plans, each captured")
    add("--plans", metavar="FOLDER", help="of --frontier: write each of its plans to this folder")
    add("--host-memory", metavar="SIZE",
        help="page-locked memory of each host that levers may use; its ranks share it")  # fmt: skip
    add(
        "--price",
        metavar="GPU=PRICE/h",
        action="append",
        default=[],
        help="of this card and of others: what a step costs here with the plan, and there without",
    )
    add_capture_options(parser)
    add("-o", "--output", metavar="PLAN", help="write the plan to this file")
    add("-f", "--force", action="store_true", help="write over an existing file")
    add("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    return ended_by_signal(lambda: _run(args), answers=True)


def _run(args: argparse.Namespace) -> int:
    job = _job(args)
    program = job.launch.target
    script = program.name if program.kind == "script" else ""
    path = output_path(args.output, force=args.force, reads=script) if args.output else None
    profile = _card(args)
    folder = _frontier_folder(args)
    from memplan.types.plan_file import save_plan

    prices = _prices(args.price, args.gpu or profile.name, profile)
    check_settings(args.alloc_conf or "", os.environ | job.environment)
    if job.rank is None and not (args.frontier or args.price):
        answer = _of_all_ranks(args, job, profile, path)
    else:
        fitted, answer = _fitted(args, job, profile, prices)
        answer = msgspec.structs.replace(answer, notes=[*answer.notes, *_notes(args, job)])
        if path is not None and fitted.plan is not None:
            save_plan(fitted.plan, path, overwrite=args.force)
            answer = msgspec.structs.replace(answer, plan=args.output)
        elif path is not None:
            notes = [*answer.notes, f"{args.output} was not written: there is no plan that fits."]
            answer = msgspec.structs.replace(answer, notes=notes)
        if folder is not None:
            answer = _with_frontier_saved(fitted, answer, folder, args)
    if args.json:
        write_json(answer)
    else:
        from memplan.fit.text import fit_lines

        hint = next_command(answer, args.own_words, job.launch)
        write_lines(fit_lines(answer, hint))
    return EXIT_YES if answer.fits else EXIT_NO


def _job(args: argparse.Namespace) -> Job:
    """The job, of which a plan can be made. Raises UsageError."""
    if args.rank == ALL_RANKS and (args.frontier or args.price):
        option = "--frontier" if args.frontier else "--price"
        raise UsageError(f"{option} is about one rank", f"{option} … --rank 0")
    job = read_job(args, _USAGE)
    if args.steps is not None and args.steps < 1:
        raise UsageError(f"--steps {args.steps}: a plan needs a training step", "--steps 3")
    return job


def _card(args: argparse.Namespace) -> DeviceProfile:
    profile = find_profile(args.gpu) if args.gpu else machine_profile()
    profile = calibrated(args.calibration, profile)
    if profile is None:
        raise UsageError(
            "no card to fit: this machine has none", f"--gpu before the script: {_USAGE}"
        )
    return profile


def _frontier_folder(args: argparse.Namespace) -> Path | None:
    """The folder for the plans of the frontier; None if no plans are to be written."""
    if args.plans and not args.frontier:
        raise UsageError("--plans without --frontier", "--frontier --plans FOLDER")
    if not args.plans:
        return None
    folder = Path(args.plans).absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{args.plans} is a file", "--plans FOLDER: one plan for each point")
    there = min(folder.glob("[0-9]*.plan"), default=folder / "0.plan")
    output_path(str(there if folder.is_dir() else folder), force=args.force)
    return folder


def _fitted(
    args: argparse.Namespace, job: Job, profile: DeviceProfile, prices: dict[str, float]
) -> tuple[Fitted, Fit]:
    """What was found, and the answer with its prices."""
    from memplan.worker.pool import Workers

    with Workers() as workers, progress_line(stages=True) as progress:
        fitted = _of_rank(args, job, profile, workers, progress)
        answer = fitted.answer
        if prices and answer.after is not None and answer.complete:
            answer = _priced(args, job, answer, prices, workers, progress)
    return fitted, answer


def _of_all_ranks(
    args: argparse.Namespace, job: Job, profile: DeviceProfile, path: Path | None
) -> Fit:
    """The answer about all ranks that can differ, whose plans are written."""
    from memplan.cli.fit_ranks import check_names, fit_ranks, save_plans
    from memplan.worker.pool import Workers
    from memplan.worker.ranks import RankCaptures

    assert job.world is not None
    size = job.world.size
    if path is not None:
        check_names(path, size, force=args.force)

    def question(rank: int) -> Question:
        return job.question(args, profile, rank=rank)

    with Workers() as workers, progress_line(stages=True) as progress:
        with RankCaptures(size, question, workers=workers) as captures:
            captures.capture(progress)

        def fit_rank(rank: int) -> Fitted:
            def say(text: str) -> None:
                progress(f"rank {rank}: {text}")

            return _of_rank(args, replace(job, rank=rank), profile, workers, say)

        answer, plans = fit_ranks(captures.seen, fit_rank)
    if path is not None and plans:
        save_plans(plans, path, size=size, force=args.force)
        answer = msgspec.structs.replace(answer, plan=args.output)
    return answer


def _of_rank(
    args: argparse.Namespace,
    job: Job,
    profile: DeviceProfile,
    workers: Workers,
    progress: Callable[[str], None],
) -> Fitted:
    from memplan.fit.choice import Limits
    from memplan.fit.flow import fit
    from memplan.fit.state import MoreNodes
    from memplan.recompute.solve import Solver
    from memplan.worker.captures import RankCapture

    limits = Limits(args.allow, args.at_most, args.frontier, _host_bytes(args.host_memory, job))
    capture = RankCapture(job.question(args, profile), workers, goes_on=True)

    def more_nodes(times: int) -> MoreNodes | None:
        wider = job.with_more_nodes(times, args.gpus_per_node)
        if wider is None or wider.world is None:
            return None
        words = tuple(wider.launch.words()) if wider.launch.world else ()
        question = RankCapture(wider.question(args, profile), workers)
        return MoreNodes(wider.world.size, question, words)

    fitted = fit(
        job.launch.target,
        profile,
        capture,
        Solver(),
        progress,
        limits,
        capture.ahead,
        job.world.size if job.world else 1,
        more_nodes,
    )
    raise_second_interrupt()  # by the first one, the answer came early
    return fitted


def _priced(
    args: argparse.Namespace,
    job: Job,
    answer: Fit,
    prices: dict[str, float],
    workers: Workers,
    progress: Callable[[str], None],
) -> Fit:
    """The answer with what a step costs: on this card with the plan, on other cards without one."""
    from memplan.fit.worth import Other, priced
    from memplan.worker.captures import RankCapture
    from memplan.worker.failure import CaptureFailedError

    def estimate_on(name: str) -> Estimate | None:
        progress(f"capturing for {name}")
        asked = RankCapture(job.question(args, find_profile(name)), workers)
        try:
            return asked(job.launch.target, quiet=True).estimate
        except CaptureFailedError:
            return None

    (gpu, price), *rest = prices.items()
    others = [Other(name, hourly, estimate_on(name)) for name, hourly in rest]
    return msgspec.structs.replace(answer, priced=priced(answer, gpu, price, others))


def _with_frontier_saved(
    fitted: Fitted, answer: Fit, folder: Path, args: argparse.Namespace
) -> Fit:
    """The answer, in which each point of the frontier names the file of its plan."""
    from memplan.types.plan_file import save_plan

    folder.mkdir(exist_ok=True)
    for number, plan in enumerate(fitted.frontier):
        save_plan(plan, folder / f"{number}.plan", overwrite=args.force)
    number = len(fitted.frontier)
    while (old := folder / f"{number}.plan").is_file():  # -f: of a longer frontier
        old.unlink()
        number += 1
    points = [
        msgspec.structs.replace(point, plan=f"{args.plans}/{number}.plan")
        for number, point in enumerate(answer.frontier)
    ]
    return msgspec.structs.replace(answer, frontier=points)


def _prices(texts: list[str], gpu: str, profile: DeviceProfile) -> dict[str, float]:
    """Prices by the name of the card, the card that is asked about first. Raises UsageError."""
    from memplan.sweep.cards import price_list

    found = price_list(texts)
    ours = [one for one in found if find_profile(one[0]).name == profile.name]
    if found and not ours:
        raise UsageError(f"no price for {gpu}", f"--price {gpu}=2.5/h,…")
    return dict([*ours, *found])


def _fraction(text: str) -> float:
    number, percent, rest = text.partition("%")
    try:
        value = float(number) / 100
    except ValueError:
        value = math.nan
    if not percent or rest or not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage, such as 5%")
    return value


def _host_bytes(text: str | None, job: Job) -> int | None:
    """Host memory for one process: the ranks on a host share it."""
    if text is None:
        return None
    return parse_size(text) // (job.world.local_size if job.world is not None else 1)


def _notes(args: argparse.Namespace, job: Job) -> list[str]:
    if job.world is None or job.world.size == 1:
        return []
    one = (
        f"The plan is made from rank {job.rank or 0} of {job.world.size}, and every rank applies it"
    )
    if args.frontier or args.price:
        return [f"{one}."]
    return [f"{one}: --rank all makes one for each that differs, as stages of a pipeline do."]


def next_command(answer: Fit, own_words: list[str], launch: Launch) -> str:
    """What the reader will most likely type next, ready to be pasted; empty when nothing helps."""
    rest = launch.words()
    fits_as_it_is = answer.fits and answer.after is None
    if answer.plan:
        return shlex.join(launch.words_below("memplan", "run", "--plan", answer.plan))
    if fits_as_it_is:
        return shlex.join(rest if launch.layers else ["python", *rest])
    own = own_words if "-o" in own_words else [*own_words, "-o", "job.plan"]
    if answer.fits:
        return shlex.join(["memplan", "fit", *own, *rest])
    change = next((change for change in answer.changes if change.command or change.launch), None)
    if change is None:
        return ""
    if change.launch:
        return shlex.join(["memplan", "fit", *own, *change.launch])
    name, *argv = change.command
    changed = ScriptTarget(launch.target.kind, name, tuple(argv))
    return shlex.join(["memplan", "fit", *own, *launch.words(changed)])
