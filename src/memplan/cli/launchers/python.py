"""`python … script.py`, `python -m module` and `env A=B …`: one process, in another setting."""

from __future__ import annotations

import re

from memplan.cli.launchers.context import Context, Step
from memplan.cli.launchers.launch import Layer
from memplan.cli.launchers.options import OptionTable
from memplan.types.errors import UsageError

PYTHON_NAME = re.compile(r"python[0-9.]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = OptionTable(
    "python",
    values="-m -c -W -X --check-hash-based-pycs",
    flags="-b -B -d -E -i -I -O -P -q -s -S -u -v -V -x -h -? --version --help",
)
_ENV = OptionTable(
    "env",
    values="-u|--unset -C|--chdir -S|--split-string",
    flags="-i|--ignore-environment -0|--null -v|--debug",
    attached="--default-signal --ignore-signal --block-signal",
)
_PYTHON_LAYER = Layer("python")


def read_python(words: list[str], _context: Context) -> Step:
    """Options of the interpreter have no say in memory and are passed over."""
    options, name, rest = _up_to_module(words)
    given, behind = _PYTHON.read(options)
    if "c" in given:
        raise UsageError("python -c: a command has no file to show lines of", "put it in a script")
    if name is not None:
        return Step(_PYTHON_LAYER, program=[name, *rest], is_module=True)
    if not behind or behind[0] == "-":
        raise UsageError("python: no script given", "python train.py")
    return Step(_PYTHON_LAYER, program=behind)


def _up_to_module(words: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Python's options end at -m: all behind the module's name is the module's."""
    for index, word in enumerate(words):
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            continue
        if not word.startswith("-") and (index == 0 or words[index - 1] not in ("-W", "-X")):
            break
        found = re.fullmatch(r"-([bBdEiIOPqsSuvx]*)m(.*)", word)
        if found is None:
            continue
        rest = [found[2], *words[index + 1 :]] if found[2] else words[index + 1 :]
        if not rest:
            raise UsageError("python -m needs the name of a module", "python -m package.train")
        options = [f"-{found[1]}"] if found[1] else []
        return [*words[:index], *options], rest[0], rest[1:]
    return words, None, []


def read_env(words: list[str], _context: Context) -> Step:
    """`env`: its assignments come before the command."""
    given, rest = _ENV.read(words)
    for option, why in (
        ("ignore-environment", "an empty environment"),
        ("unset", "an environment with less in it"),
        ("chdir", "another folder"),
        ("split-string", "words in one string"),
    ):
        if option in given:
            raise UsageError(
                f"env --{option}: {why} cannot be had from here",
                "the same in the shell before memplan",
            )
    return assignments(rest)


def assignments(words: list[str]) -> Step:
    """`A=B C=D command …`"""
    found: dict[str, str] = {}
    index = 0
    while index < len(words) and (match := _ASSIGNMENT.fullmatch(words[index])):
        found[match[1]] = match[2]
        index += 1
    return Step(Layer("env", fixed=found, module_option=""), command=words[index:])


def is_assignment(word: str) -> bool:
    return _ASSIGNMENT.fullmatch(word) is not None
