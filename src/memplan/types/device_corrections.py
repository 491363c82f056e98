"""What was measured on the user's own cards, in place of the profiles' figures.

`memplan verify --calibrate` writes them to `$XDG_CONFIG_HOME/memplan/devices.toml` (by default
`~/.config/memplan/devices.toml`), one table a card, by the name that PyTorch gives it.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from memplan.types.errors import FormatError
from memplan.types.output_file import write_file

MEASURED_HERE = "measured here"
"""How `Correction.measured` begins where memplan wrote it."""
_MOST_BYTES = 1 << 20
_Mebibytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_BELOW, _ABOVE, _LEAST = 0.05, 0.10, 20
"""The range around a measured context: runs of other jobs load other kernels. Fractions, MiB."""


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A card's context as measured: low, expected, high, in MiB."""

    context_mib: tuple[_Mebibytes, _Mebibytes, _Mebibytes]
    measured: str
    """When and with what, in words."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    devices: dict[str, Correction] = {}


def corrections_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(base) / "memplan" / "devices.toml"


def read_corrections() -> dict[str, Correction]:
    """By the name of the card; none without a file. Raises FormatError."""
    path = corrections_path()
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError:
        return {}
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError("too large")
        found = msgspec.convert(tomllib.loads(text.decode()), _File).devices
        for name, one in found.items():
            if list(one.context_mib) != sorted(one.context_mib):
                raise ValueError(f"{name}: context_mib is low, expected, high")
    except (ValueError, msgspec.ValidationError) as error:
        raise FormatError(
            f"{path}: {error}", "`memplan verify --calibrate` writes it; without it the tables hold"
        ) from None
    return found


def context_of(measured_mib: int) -> tuple[int, int, int]:
    """Low, expected and high of a context that was measured once."""
    below = max(round(measured_mib * _BELOW), _LEAST)
    above = max(round(measured_mib * _ABOVE), _LEAST)
    return max(measured_mib - below, 0), measured_mib, measured_mib + above


def save_correction(device_name: str, correction: Correction) -> Path:
    """Put a card's correction into the file, in the place of an earlier one."""
    path = corrections_path()
    every = read_corrections() | {device_name: correction}
    lines = ["# Measured by `memplan verify --calibrate`.\n"]
    for name, one in sorted(every.items()):
        low, expected, high = one.context_mib
        lines.append(
            f"\n[devices.{json.dumps(name)}]\ncontext_mib = [{low}, {expected}, {high}]\n"
            f"measured = {json.dumps(one.measured)}\n"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, ["".join(lines).encode()], overwrite=True)
    return path
