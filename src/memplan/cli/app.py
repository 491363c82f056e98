"""`memplan`: finds the command, runs it, and turns what went wrong into a message and an exit code.

Exit codes: 0 yes (fits, done), 1 a fault of memplan, 2 usage, 3 no (does not fit), 4 no answer.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from pathlib import Path
from typing import cast

from memplan import __version__
from memplan.cli.command import EXIT_YES, Command, Parser
from memplan.cli.program import split_program
from memplan.cli.streams import write_answer
from memplan.types.errors import UsageError
from memplan.worker.failure import (
    CaptureFailedError,
    complaint,
    outcome_of,
    show_traceback,
    was_interrupted,
)
from memplan.worker.leave import leave

COMMANDS = {
    "estimate": "memplan.cli.estimate",
    "fit": "memplan.cli.fit",
    "sweep": "memplan.cli.sweep",
    "verify": "memplan.cli.verify",
    "recompute": "memplan.cli.recompute",
    "order": "memplan.cli.order",
    "layout": "memplan.cli.layout",
    "plan": "memplan.cli.plan",
    "run": "memplan.cli.run",
    "place": "memplan.cli.place",
    "calibrate": "memplan.cli.calibrate",
    "simulate": "memplan.cli.simulate",
    "report": "memplan.cli.report",
    "diff": "memplan.cli.diff",
    "export": "memplan.cli.export",
    "mcp": "memplan.cli.mcp",
    "completion": "memplan.cli.completion",
    "env": "memplan.cli.env",
}
_EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default); the exit code. Raises nothing."""
    if argv is not None:
        return _answered(list(argv), own_process=False)
    code = _answered(sys.argv[1:], own_process=True)
    if sys.argv[1:2] != ["run"]:
        leave(code)
    return code


def _answered(words: list[str], *, own_process: bool) -> int:
    try:
        return _dispatch(words, own_process=own_process)
    except KeyboardInterrupt:
        _complain("interrupted")
        return _EXIT_INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_YES
    except Exception as error:
        if was_interrupted(error):
            _complain("interrupted")
            return _EXIT_INTERRUPTED
        if isinstance(error, CaptureFailedError):
            sys.stderr.write(error.wrote)
        outcome = outcome_of(error)
        _complain(outcome.message, outcome.hint)
        return outcome.exit_code


def _dispatch(words: list[str], *, own_process: bool) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        write_answer(_overview())
        return EXIT_YES
    name, rest = words[0], words[1:]
    if name in ("-V", "--version", "version"):
        write_answer(f"memplan {__version__}\n")
        return EXIT_YES
    if name not in COMMANDS:
        raise _unknown_command(name)
    command = load_command(name)
    parser = Parser(prog=f"memplan {name}", description=command.__doc__, allow_abbrev=False)
    command.prepare_parser(parser)
    program = None
    if command.TAKES_PROGRAM:
        rest, program = split_program(parser, rest)
    args = parser.parse_args(rest)
    _refuse_empty(parser, args)
    args.program, args.own_words = program, rest
    args.own_process = own_process
    return command.run(args)


def _refuse_empty(parser: Parser, args: argparse.Namespace) -> None:
    """Raises UsageError for an option with an empty value, as from a shell variable not set."""
    for action in parser.options():
        if getattr(args, action.dest) == "":
            name = action.option_strings[-1] if action.option_strings else action.metavar
            raise UsageError(f"{parser.prog}: {name} is empty", "is a shell variable not set?")


def load_command(name: str) -> Command:
    return cast(Command, importlib.import_module(COMMANDS[name]))


def _overview() -> str:
    lines = [
        "memplan tells you, before you train, whether a PyTorch job fits on a GPU.",
        "",
        "usage: memplan COMMAND [options]",
        "",
    ]
    for name in COMMANDS:
        summary = (load_command(name).__doc__ or "").strip().splitlines()[0]
        lines.append(f"  {name:<12}{summary}")
    lines += [
        "",
        "memplan COMMAND --help says more; memplan --version prints the version.",
        "",
        "start with: memplan estimate --gpu 24GiB train.py",
    ]
    return "\n".join(lines) + "\n"


def _unknown_command(name: str) -> UsageError:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    if near:
        return UsageError(f"no command {name!r}", f"memplan {near[0]}")
    if name.endswith(".py") or Path(name).exists():
        return UsageError(f"no command {name!r}", f"memplan estimate {name}")
    return UsageError(f"no command {name!r}", f"one of {', '.join(COMMANDS)}; memplan --help")


def _complain(message: str, hint: str = "") -> None:
    show_traceback()
    sys.stderr.write(complaint(message, hint))
    sys.stderr.flush()
