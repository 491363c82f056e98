"""What a command is, and the exit codes that are answers."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from decimal import Decimal, InvalidOperation
from typing import NoReturn, Protocol

from memplan.types.errors import UsageError

EXIT_YES = 0
"""It fits; done."""
EXIT_NO = 3
"""It does not fit."""
_MOST = 10**18
"""Whole numbers beyond it are no counts of anything, and floating point has no room for some."""


def whole(text: str, what: str, least: int = 0) -> int:
    """A whole number on the command line, as `1000000`, `1_000_000` or `1e6`. `what`: in words,
    what it is not."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("nan")
    if number.is_finite() and number > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_MOST:,}")
    if not number.is_finite() or number < least or number % 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(number)


def positive(text: str) -> int:
    return whole(text, "a number from 1 on", 1)


def step_count(text: str) -> int:
    return whole(text, "a number of steps")


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


class Command(Protocol):
    """A module of this package: its docstring is the help text, its first line the summary."""

    __doc__: str | None
    TAKES_PROGRAM: bool
    """Whether a user's script or module follows our own options."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code. Raises MemplanError."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, with near options for a misspelt one."""

    def options(self) -> list[argparse.Action]:
        """The arguments that have a value, but for those of the user's program."""
        return [action for action in self._actions if action.default is not argparse.SUPPRESS]

    def error(self, message: str) -> NoReturn:
        known = {
            option.lstrip("-"): option
            for action in self._actions
            if action.dest != "help"
            for option in action.option_strings
        }
        near = [
            known[match]
            for word in re.findall(r"(?<!\S)--?([\w-]+)", message)
            if word not in known
            for match in difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.65)
        ]
        hint = f"{near[0]}, or `{self.prog} --help`" if near else f"`{self.prog} --help`"
        if "unrecognized" in message and "SCRIPT" in self.format_usage():
            hint += "; options of the script come after its name"
        raise UsageError(f"{self.prog}: {message}", hint)
