"""Run a training script with a plan in effect.

The script runs unchanged, on the CPU or on CUDA; its losses and gradients are the same bits as
without the plan on deterministic kernels. The exit code is the script's own, or 125 when memplan
failed before the script began.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from pathlib import Path

import memplan
from memplan.cli.command import CONF_VARIABLES
from memplan.cli.files import plan_path
from memplan.cli.launchers.read import read_launch
from memplan.cli.program import check_program
from memplan.types.errors import MemplanError, UsageError

TAKES_PROGRAM = True
EXIT_NOT_STARTED = 125
_PACKAGE = str(Path(memplan.__file__).parent)
_USAGE = "memplan run --plan job.plan train.py"


class NotStartedError(MemplanError):
    """The script was not started."""

    exit_code = EXIT_NOT_STARTED


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    usage = "memplan run [--plan PLAN] {} [ARGS…]"
    parser.usage = f"{usage.format('SCRIPT')}\n       {usage.format('-m MODULE')}"
    parser.add_argument("--plan", metavar="PLAN", help="a plan that memplan fit has made")
    parser.add_argument("-m", metavar="MODULE", help="run a module instead of a script")


def run(args: argparse.Namespace) -> int:
    from memplan.runtime.script import run_program
    from memplan.types.plan import Plan
    from memplan.types.plan_file import load_plan

    try:
        _refuse_launcher(args)
        program = check_program(args.program, _USAGE)
        plan = load_plan(plan_path(args.plan)) if args.plan else Plan()
        _set_allocator(plan.alloc_conf)
    except MemplanError as error:
        raise NotStartedError(error.message, error.hint) from error
    try:
        run_program(program.kind, program.name, program.argv, plan, _note)
    except SystemExit as stop:
        return _exit_code(stop)
    except Exception as error:
        _print_as_python_would(error)
        return 1
    return 0


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
    is imported. Raises UsageError for what PyTorch would refuse."""
    if conf and not any(os.environ.get(name) for name in CONF_VARIABLES):
        from memplan.simulate import AllocatorSettings

        AllocatorSettings.parse(conf)
        for name in CONF_VARIABLES:  # PyTorch goes by the first that is set, be it empty
            os.environ.pop(name, None)
        os.environ[CONF_VARIABLES[-1]] = conf


def _note(text: str) -> None:
    sys.stderr.write(f"memplan: {text}\n")


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _print_as_python_would(error: Exception) -> None:
    """The traceback from the script on, without the frames that lead to it."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace or error.__traceback__))


def _is_ours(filename: str) -> bool:
    return filename == "<frozen runpy>" or filename.startswith(_PACKAGE)
