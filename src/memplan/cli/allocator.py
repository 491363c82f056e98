"""Allocator settings of an option and of the environment, checked before anything slow begins."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.types.alloc_conf import CONF_VARIABLES
from memplan.types.errors import UsageError


def check_settings(option: str, environment: Mapping[str, str]) -> None:
    """Raises UsageError for what PyTorch would refuse, of the option and of the variable that
    counts."""
    from memplan.simulate import AllocatorSettings

    AllocatorSettings.parse(option)
    name = next((name for name in CONF_VARIABLES if name in environment), "")
    conf = environment.get(name, "")
    try:
        AllocatorSettings.parse(conf)
    except UsageError as error:
        what = error.message.removeprefix("allocator settings: ")
        raise UsageError(f"{name}={conf} of the environment: {what}", error.hint) from error
