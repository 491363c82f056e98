"""Allocator settings of an option and of the environment, checked before anything slow begins."""

from __future__ import annotations

import re
from collections.abc import Mapping

from memplan.cli.command import CONF_VARIABLES
from memplan.types.errors import UsageError

_COMMA = re.compile(r",(?![^\[]*\])")
"""Outside brackets."""


def check_settings(option: str | None, environment: Mapping[str, str]) -> None:
    """Raises UsageError for what PyTorch would refuse, of the option and of the variable that
    counts."""
    from memplan.simulate import AllocatorSettings

    if option:
        AllocatorSettings.parse(option)
    name, conf = settings_of(environment)
    try:
        AllocatorSettings.parse(conf)
    except UsageError as error:
        what = error.message.removeprefix("allocator settings: ")
        raise UsageError(f"{name}={conf} of the environment: {what}", error.hint) from error


def settings_of(environment: Mapping[str, str]) -> tuple[str, str]:
    """The variable that PyTorch reads and its value: the first that is set, be it empty; two empty
    strings when none is."""
    return next(((name, environment[name]) for name in CONF_VARIABLES if name in environment),
                ("", ""))  # fmt: skip


def merged(conf: str, option: str | None) -> str:
    """`conf` with the keys of `option` in place of its own."""
    pairs = [pair.strip() for pair in _COMMA.split(f"{conf},{option or ''}") if pair.strip()]
    return ",".join({_key(pair): pair for pair in pairs}.values())


def _key(pair: str) -> str:
    return pair.partition(":")[0].strip()
