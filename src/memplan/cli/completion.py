"""Completion of commands, options, cards and files by the shell.

Prints a script for the shell that is named: `eval "$(memplan completion bash)"` in ~/.bashrc, or a
file where the shell looks for completions (docs/install.md).
"""

from __future__ import annotations

import argparse

from memplan.cli.command import EXIT_YES, Parser
from memplan.cli.streams import write_answer
from memplan.types.device import known_profiles
from memplan.types.errors import UsageError

TAKES_PROGRAM = False
_SHELLS = ("bash", "zsh", "tcsh")
_CARD = "NAME|SIZE"
_FILES = {"FILE", "TRACE", "TRACE|GRAPH", "PLAN", "BEFORE", "AFTER", "OUT", "OUT.csv"} | {
    "PROBLEM.csv",
    "PACKAGE|RULES.py",
}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS)


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise UsageError(
            "completion needs shtab, which is not installed", "pip install 'memplan[completion]'"
        ) from error
    write_answer(shtab.complete(_whole_command_line(), args.shell) + "\n")
    return EXIT_YES


def _whole_command_line() -> Parser:
    """One parser of every command, for shtab to read: the command line itself needs no such."""
    import shtab

    from memplan.cli.app import COMMANDS, load_command

    whole = Parser(prog="memplan", allow_abbrev=False)
    whole.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = whole.add_subparsers()
    for name in COMMANDS:
        command = load_command(name)
        summary = (command.__doc__ or "").strip().splitlines()[0]
        parser = commands.add_parser(name, help=summary, description=summary)
        command.prepare_parser(parser)
        if command.TAKES_PROGRAM:
            parser.add_argument("script", nargs="*", metavar="SCRIPT", help="and its arguments")
        for action in parser._actions:
            if action.metavar == _CARD:
                action.choices = [profile.name for profile in known_profiles()]
            elif action.metavar in _FILES or action.dest == "script":
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's way
            elif action.metavar == "FOLDER":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return whole
