"""Which option of a script a person means, and the value it has now."""

from __future__ import annotations

import difflib

from memplan.capturing.options import ScriptTarget
from memplan.fit.knobs import Knob, find_knobs, kind_of
from memplan.fit.options import Declared, NumericOption, declared_options, given_options, plain_name
from memplan.types.errors import UsageError


def find_option(program: ScriptTarget, name: str) -> NumericOption:
    """The option that `name` means, dashes and underscores alike, and leading dashes left away.

    In this order: given to the script under that name or another spelling of it; given as the last
    part of a dotted name (`data.batch_size=8`); declared by the script's source with a default;
    of the same meaning (`batch-size` for `--per_device_train_batch_size`). Raises UsageError.
    """
    if not plain_name(name):
        raise UsageError(f"--maximize {name!r} names no option", "--maximize batch-size")
    given, declared = _meant(program, name, "--maximize")
    if given:
        return _read(*given[-1])
    for one in declared:
        if one.default:
            return NumericOption(one.longest, one.default)
    if (knob := _same_kind(program, name)) is not None:
        return NumericOption(knob.option, knob.value)
    raise unknown_option(program, "--maximize", name)


def option_to_vary(program: ScriptTarget, name: str) -> str | None:
    """The same without its value, which need be no number: of those declared with or without a
    default, the last. None where there is none."""
    given, declared = _meant(program, name, "--vary")
    found = [option for option, _ in given] or [one.longest for one in declared]
    if found:
        return found[-1]
    knob = _same_kind(program, name)
    return None if knob is None else knob.option


def unknown_option(program: ScriptTarget, asked: str, name: str) -> UsageError:
    """The error for an unknown option, with similar names that the script declares or is given."""
    known = [option for one in declared_options(program) for option in one.names]
    known += [option for option, _ in given_options(program.argv)]
    plain = {plain_name(option): option.lstrip("-") for option in known}
    near = difflib.get_close_matches(plain_name(name), plain, n=3, cutoff=0.5)
    option = name if name.startswith("-") else f"--{name}"
    hint = f"`{' '.join([program.name, *program.argv, option, '8'])}`: with a value in the command"
    if near:
        hint = f"{asked} {' or '.join(plain[one] for one in near)}; or {hint}"
    return UsageError(
        f"{asked} {name}: no such option with a value, neither in the command nor as a default in "
        f"{program.name}",
        hint,
    )


def _meant(
    program: ScriptTarget, name: str, asked: str
) -> tuple[list[tuple[str, str]], list[Declared]]:
    """What is given to the script under that name, with values, and what its source declares.
    Raises UsageError where several options have it as the last part of a dotted name."""
    wanted = plain_name(name)
    declared = [one for one in declared_options(program) if wanted in map(plain_name, one.names)]
    spellings = {plain_name(option) for one in declared for option in one.names} | {wanted}
    given = list(given_options(program.argv))
    found = [one for one in given if plain_name(one[0]) in spellings]
    if not found:
        found = [one for one in given if plain_name(one[0]).rpartition(".")[2] in spellings]
        options = sorted({option for option, _ in found})
        if len(options) > 1:
            raise UsageError(
                f"{asked} {name} could be any of {', '.join(options)}", f"{asked} {options[0]}"
            )
    return found, declared


def _same_kind(program: ScriptTarget, name: str) -> Knob | None:
    kind = kind_of([name])
    return next((knob for knob in find_knobs(program) if knob.kind == kind), None)


def _read(option: str, text: str) -> NumericOption:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"{option} is {text!r}, not a whole number above 0", "a value to begin with, such as 8"
        )
    return NumericOption(option, int(text))
