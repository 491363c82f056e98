"""The user's program on our command line: where our options end, and whether it exists."""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path

from memplan.capturing.options import ScriptTarget
from memplan.fit.options import top_spec
from memplan.types.errors import UsageError

_RECORDINGS = (".trace", ".pickle", ".pkl", ".csv")
_SHELL = re.compile(rb"#!\s*\S*/(?:env (?:-S )?)?\w*sh\s")


def split_program(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[list[str], ScriptTarget | None]:
    """Our own words, and the program with its arguments, verbatim.

    The program begins at the first word that is neither an option of ours nor an option's value,
    at `-m MODULE`, or after `--`; argparse alone would look for our options behind it as well.
    """
    own: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            index += 1
            break
        if word.startswith("-m") and not word.startswith("--"):
            return own, _module(word[2:], words[index + 1 :])
        if not word.startswith("-") or word == "-":
            break
        taken = words[index : index + _option_length(parser, word)]
        own += _attached(parser, taken)
        index += len(taken)
    rest = words[index:]
    return own, ScriptTarget("script", rest[0], tuple(rest[1:])) if rest else None


def _attached(parser: argparse.ArgumentParser, option: list[str]) -> list[str]:
    """`--vary --tp=1,2` as `--vary=--tp=1,2`: argparse takes a word with a dash in front for an
    option of its own, whatever stands before it."""
    *name, value = option
    dashed = value.startswith("--") and "=" in value
    known = {known for action in parser._actions for known in action.option_strings}
    if name and name[0].startswith("--") and dashed and value.partition("=")[0] not in known:
        return [f"{name[0]}={value}"]
    return option


def _module(attached: str, rest: list[str]) -> ScriptTarget:
    words = [attached, *rest] if attached else rest
    if not words:
        raise UsageError("-m needs the name of a module", "-m package.train")
    return ScriptTarget("module", words[0], tuple(words[1:]))


def _option_length(parser: argparse.ArgumentParser, word: str) -> int:
    """Words that an option takes, itself included. An unknown one takes one: argparse will refuse
    it, with everything behind it kept out of the complaint."""
    name, equals, _ = word.partition("=")
    actions = {option: action for action in parser._actions for option in action.option_strings}
    if word.startswith("--"):
        action = actions.get(name)
        return 1 if equals or action is None or action.nargs == 0 else 2
    for position, letter in enumerate(word[1:], start=1):
        action = actions.get(f"-{letter}")
        if action is None:
            return 1
        if action.nargs != 0:
            return 2 if position == len(word) - 1 else 1
    return 1


def check_program(program: ScriptTarget | None, usage: str) -> ScriptTarget:
    """The program, once it is sure that it can be found. Raises UsageError, with near names."""
    if program is None:
        raise UsageError("no script given", usage)
    if program.kind == "module":
        _check_module(program.name)
    else:
        _check_script(Path(program.name))
    return program


def _check_script(path: Path) -> None:
    if path.is_file():
        _refuse_other_kinds(path)
        return
    if path.is_dir():
        raise UsageError(f"{path} is a directory", f"-m {path.name}, or a script inside it")
    near = difflib.get_close_matches(path.stem, [one.stem for one in path.parent.glob("*.py")])
    hint = ", ".join(str(path.parent / f"{name}.py") for name in near)
    if not hint:
        hint = f"a script in {path.parent.resolve()}, or -m MODULE"
        if not path.parent.is_dir():
            hint = f"another folder: {path.parent} does not exist"
        elif not path.suffix:
            hint += f"; if {path} is a program that starts one, what it starts: python train.py"
    raise UsageError(f"no script {path}", hint)


def _refuse_other_kinds(path: Path) -> None:
    """A trace or a snapshot in the script's place (its first byte begins no Python source), a
    notebook or a shell script."""
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return
    if b"\x80" <= first[:1] < b"\xc0" or (path.suffix in _RECORDINGS):
        raise UsageError(f"{path} is a recording, not a script", f"memplan simulate {path}")
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook, not a script",
            f"%load_ext memplan and %%memplan in it; or jupyter nbconvert --to script {path}",
        )
    if path.suffix == ".sh" or _SHELL.match(first):
        raise UsageError(
            f"{path} is a shell script, and what it would run cannot be followed",
            "the command in it that starts the training: memplan estimate … train.py …, "
            "or memplan estimate … torchrun … train.py …",
        )


def _check_module(name: str) -> None:
    if top_spec(name) is None:
        hint = "run it from the folder that holds the package"
        if Path(name).is_file():
            hint = f"{name} without -m"
        raise UsageError(f"no module {name} from {Path.cwd()}", hint)
