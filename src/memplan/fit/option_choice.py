"""Which option of a script a person means, and the value it has now."""

from __future__ import annotations

import difflib

from memplan.capturing.options import ScriptTarget
from memplan.fit.knobs import find_knobs, kind_of
from memplan.fit.options import Declared, NumericOption, declared_options, given_options, plain_name
from memplan.types.errors import UsageError


def find_option(program: ScriptTarget, name: str) -> NumericOption:
    """The option that `name` means, dashes and underscores alike, and leading dashes left away.

    In this order: given to the script under that name or another spelling of it; given as the last
    part of a dotted name (`data.batch_size=8`); declared by the script's source with a default;
    of the same meaning (`batch-size` for `--per_device_train_batch_size`). Raises UsageError.
    """
    wanted = plain_name(name)
    if not wanted:
        raise UsageError(f"--maximize {name!r} names no option", "--maximize batch-size")
    declared = list(declared_options(program))
    meant = _declared_as(declared, wanted)
    spellings = {plain_name(option) for one in meant for option in one.names} | {wanted}
    given = list(given_options(program.argv))
    for found in (
        [one for one in given if plain_name(one[0]) in spellings],
        _only([one for one in given if plain_name(one[0]).rpartition(".")[2] in spellings], name),
    ):
        if found:
            return _read(*found[-1])
    for one in meant:
        if one.default:
            return NumericOption(one.longest, one.default)
    kind = kind_of([name])
    for knob in find_knobs(program):
        if kind is not None and knob.kind == kind:
            return NumericOption(knob.option, knob.value)
    raise _not_found(program, name, declared)


def _declared_as(declared: list[Declared], wanted: str) -> list[Declared]:
    return [one for one in declared if wanted in map(plain_name, one.names)]


def _only(found: list[tuple[str, str]], name: str) -> list[tuple[str, str]]:
    options = sorted({option for option, _ in found})
    if len(options) > 1:
        raise UsageError(
            f"--maximize {name} could be any of {', '.join(options)}", f"--maximize {options[0]}"
        )
    return found


def _read(option: str, text: str) -> NumericOption:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"{option} is {text!r}, not a whole number above 0", "a value to begin with, such as 8"
        )
    return NumericOption(option, int(text))


def _not_found(program: ScriptTarget, name: str, declared: list[Declared]) -> UsageError:
    words = [program.name, *program.argv]
    names = {plain_name(option): option for one in declared for option in one.names}
    near = difflib.get_close_matches(plain_name(name), names, n=3, cutoff=0.5)
    option = name if name.startswith("-") else f"--{name}"
    hint = f"`{' '.join([*words, option, '8'])}`: the option behind the script, with a value"
    if near:
        hint += f"; or --maximize {' or '.join(names[one].lstrip('-') for one in near)}"
    return UsageError(
        f"no option {option} with a value, neither behind {program.name} nor as a default in it",
        hint,
    )
