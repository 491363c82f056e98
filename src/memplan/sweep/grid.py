"""The grid of combinations, and the options that it varies, found in a command."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from memplan.capturing.options import ScriptTarget
from memplan.fit.knobs import find_knobs, kind_of
from memplan.fit.options import declared_options, given_options, plain_name
from memplan.types.errors import UsageError

USUAL_MOST = 2000
"""Combinations that are tried unasked."""


@dataclass(frozen=True)
class Dimension:
    """An option and the values to try."""

    name: str
    values: tuple[str, ...]


def read_dimension(text: str) -> Dimension:
    """`batch-size=4,8,16`. Raises UsageError."""
    name, equals, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(","))
    if not equals or not plain_name(name) or not all(found):
        raise UsageError(f"--vary {text!r} is no option with values", "--vary batch-size=4,8,16")
    if len(set(found)) < len(found):
        raise UsageError(
            f"--vary {text!r} names a value twice",
            f"--vary {name}=" + ",".join(dict.fromkeys(found)),
        )
    return Dimension(name.strip(), found)


def combinations(
    gpus: Sequence[str], dimensions: Sequence[Dimension], most: int
) -> list[tuple[str, tuple[str, ...]]]:
    """Every card with every value of every option. Raises UsageError where they are more than
    `most`, and for an option that is varied twice."""
    names = [plain_name(one.name) for one in dimensions]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"--vary {name} is given twice", f"--vary {name}=1,2,4 with all values"
            )
    size = len(gpus) * math.prod(len(one.values) for one in dimensions)
    if size > most:
        raise UsageError(
            f"the grid has {size:,} combinations, more than {most:,}",
            f"fewer values, or --most {size} to have them all captured",
        )
    return list(product(gpus, product(*(one.values for one in dimensions))))


@dataclass(frozen=True)
class ScriptOption:
    option: str

    def changed(self, program: ScriptTarget, value: str) -> ScriptTarget:
        return program.with_option(self.option, value)


def find_script_option(program: ScriptTarget, name: str) -> ScriptOption | None:
    """The option that `name` means: given under that name or another spelling of it, given as the
    last part of a dotted name, declared by the source, or of the same meaning (`batch-size` for
    `--per_device_train_batch_size`)."""
    wanted = plain_name(name)
    declared = [one for one in declared_options(program) if wanted in map(plain_name, one.names)]
    spellings = {plain_name(option) for one in declared for option in one.names} | {wanted}
    given = [option for option, _ in given_options(program.argv)]
    for found in (
        [option for option in given if plain_name(option) in spellings],
        [option for option in given if plain_name(option).rpartition(".")[2] in spellings],
        [one.longest for one in declared],
    ):
        if len(set(found)) > 1 and not declared:
            raise UsageError(
                f"--vary {name} could be any of {', '.join(sorted(set(found)))}",
                f"--vary {found[0]}=…",
            )
        if found:
            return ScriptOption(found[-1])
    kind = kind_of([name])
    same = (knob.option for knob in find_knobs(program) if kind is not None and knob.kind == kind)
    option = next(same, None)
    return None if option is None else ScriptOption(option)


def unknown_option(program: ScriptTarget, name: str) -> UsageError:
    """The error for an unknown option, with similar names that the script declares or is given."""
    known = {plain_name(one): one for one in _known(program)}
    near = difflib.get_close_matches(plain_name(name), known, n=3, cutoff=0.5)
    option = name if name.startswith("-") else f"--{name}"
    hint = f"{option} with a value in the command, which is then varied"
    if near:
        hint = f"--vary {' or '.join(known[one].lstrip('-') for one in near)}; or {hint}"
    return UsageError(
        f"--vary {name}: no such option, neither of a launcher in the command, nor behind "
        f"{program.name}, nor declared in it",
        hint,
    )


def _known(program: ScriptTarget) -> Iterator[str]:
    for one in declared_options(program):
        yield from one.names
    for option, _ in given_options(program.argv):
        yield option


def changed_words(words: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    """The words of launchers with another value of an option that is among them."""
    return ScriptTarget("script", "", tuple(words)).with_option(option, value).argv
