"""Run a training script with a plan in effect, or plan its memory while it runs.

The script runs unchanged, on the CPU or on CUDA; its losses and gradients are the same bits as
without the plan on deterministic kernels. Without --plan, on a GPU, the first steps are recorded
and planned in the background. The exit code is the script's own, or 125 when memplan failed before
the script began.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import memplan
from memplan.cli.files import output_path, read_plan
from memplan.cli.launchers.read import read_launch
from memplan.cli.program import check_program
from memplan.cli.rank_files import of_rank, plan_of_rank, rank
from memplan.cli.run_signals import finished
from memplan.sweep.cards import hourly
from memplan.types.alloc_conf import CONF_VARIABLES
from memplan.types.errors import MemplanError, OptimizerInBackwardError, UsageError

if TYPE_CHECKING:
    from memplan.capturing.options import ScriptTarget
    from memplan.cli.run_watch import Watch
    from memplan.runtime.planned.files import RunFiles
    from memplan.runtime.planned.install import PlannedRun
    from memplan.types.plan import Plan

TAKES_PROGRAM = True
EXIT_NOT_STARTED = 125
_PACKAGE = str(Path(memplan.__file__).parent)
_USAGE = "memplan run --plan job.plan train.py"


class NotStartedError(MemplanError):
    exit_code = EXIT_NOT_STARTED


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    options = "[--plan PLAN] [--record TRACE] [--stats FILE] [--price PRICE/h] [--watch]"
    usage = f"memplan run {options} {{}} [ARGS…]"
    parser.usage = f"{usage.format('SCRIPT')}\n       {usage.format('-m MODULE')}"
    add = parser.add_argument
    add("--plan", metavar="PLAN", help="a plan of memplan fit or memplan plan")
    add(
        "--record", metavar="TRACE", help="plan nothing: write the job's real requests to this file"
    )
    add("--stats", metavar="FILE", help="write what the memory did, as JSON")
    add("--price", metavar="PRICE/h", type=hourly, help="of this GPU: what planning costs in money")
    add("--watch", action="store_true",
        help="show the job's memory beside the plan in the terminal's last lines")  # fmt: skip
    add("-f", "--force", action="store_true", help="write over existing files")
    add("-m", metavar="MODULE", help="run a module instead of a script")


def run(args: argparse.Namespace) -> int:
    try:
        _refuse_launcher(args)
        program = check_program(args.program, _USAGE)
        plan, files, running = _prepare(args, program)
    except MemplanError as error:
        raise NotStartedError(error.message, error.hint) from error
    from memplan.capturing.job.run import run_program
    from memplan.runtime.in_effect import plan_in_effect

    watch = _watch(running, files.say) if args.watch else ExitStack()

    def finish() -> None:
        watch.close()
        running.close()
        files.finish(running)

    command, program = program.command, program.with_arguments(plan)
    with finished(finish, also_by_signal=files.any or args.watch), watch:
        try:
            with plan_in_effect(plan, command, lambda _, text: files.say(text)) as files.in_effect:
                run_program(program.kind, program.name, program.argv)
        except SystemExit as stop:
            return _exit_code(stop)
        except OptimizerInBackwardError:
            raise
        except Exception as error:
            _print_as_python_would(error)
            return 1
    return 0


def _prepare(args: argparse.Namespace, program: ScriptTarget) -> tuple[Plan, RunFiles, PlannedRun]:
    """The plan, the files to write, and the allocator in place: PyTorch's own where the plan is of
    recomputation alone, for it was checked with that."""
    from memplan.types.plan import Plan

    name = plan_of_rank(args.plan) if args.plan else ""
    plan = read_plan(name) if name else Plan()
    if args.record and plan.allocation is not None:
        raise UsageError(
            "--record beside a plan of allocation: what is recorded is how a job is without one",
            "--record alone, or with a plan of memplan fit",
        )
    trace, stats = (
        _output(text, args.force, name, program) if text else None
        for text in (args.record, args.stats)
    )
    if trace is not None and trace == stats:
        raise UsageError("--record and --stats name the same file", "two names")
    serve = plan.allocation is not None or not name or bool(args.record)
    if not serve:
        _set_allocator(plan.alloc_conf)
    from memplan.runtime.in_effect import without_gpu
    from memplan.runtime.planned.files import RunFiles
    from memplan.runtime.planned.install import PlannedRun, compare, start

    files = RunFiles(_note, name, trace, stats, overwrite=args.force, price=args.price)
    if said := without_gpu(plan):
        files.say(said)
    if not serve:
        compare(plan, program.command, files.say)
        return plan, files, PlannedRun()
    given = plan if plan.allocation is not None else None
    running = start(given, command=program.command, record_all=bool(args.record), say=files.say)
    return plan, files, running


def _watch(running: PlannedRun, say: Callable[[str], None]) -> Watch:
    from memplan.cli.run_watch import Watch, memory_of

    return Watch(lambda: memory_of(running), sys.stderr.fileno(), say)


def _output(text: str, force: bool, plan: str, program: ScriptTarget) -> Path:
    script = program.name if program.kind == "script" else ""
    output_path(of_rank(text), force=force, reads=script)
    return output_path(of_rank(text), force=force, reads=plan)


def _refuse_launcher(args: argparse.Namespace) -> None:
    """Raises UsageError for `memplan run torchrun …`, with the order that works: this process is
    one of the job's, and starts no others."""
    if args.program is None:
        return
    launch = read_launch(args.program)
    if launch.layers:
        raise UsageError(
            f"memplan run goes between {launch.layers[-1].launcher} and the script",
            shlex.join(launch.words_below("memplan", "run", *args.own_words)),
        )


def _set_allocator(conf: str) -> None:
    """Settings that the plan counts on, where the environment has none. PyTorch reads them when it
    is imported."""
    if conf and not any(os.environ.get(name) for name in CONF_VARIABLES):
        for name in CONF_VARIABLES:  # PyTorch goes by the first that is set, be it empty
            os.environ.pop(name, None)
        os.environ[CONF_VARIABLES[-1]] = conf


def _note(text: str) -> None:
    number = rank()
    with suppress(OSError, ValueError, AttributeError):  # the script may have closed it
        sys.stderr.write(f"memplan{'' if number is None else f' (rank {number})'}: {text}\n")


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _print_as_python_would(error: Exception) -> None:
    """The traceback from the script on, without the frames that lead to it; none where it has not
    begun."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None:
        sys.stderr.writelines(traceback.format_exception_only(error))
    else:
        traceback.print_exception(error.with_traceback(trace))


def _is_ours(filename: str) -> bool:
    leads = filename.startswith("<frozen ")  # runpy, and what finds a module
    return leads or filename.startswith(_PACKAGE)
