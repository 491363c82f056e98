"""What was measured on the user's own cards, in place of the profiles' figures.

`memplan verify --calibrate` and `memplan calibrate` write them to
`$XDG_CONFIG_HOME/memplan/devices.toml` (by default `~/.config/memplan/devices.toml`), one table a
card, by the name that PyTorch gives it.
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
SHARES = (1e-6, 16.0)
"""What a class of kernels may reach: below, times overflow; none comes near either end."""
_Share = Annotated[float, msgspec.Meta(ge=SHARES[0], le=SHARES[1])]
_BELOW, _ABOVE, _LEAST = 0.05, 0.10, 20
"""The range around a measured context: runs of other jobs load other kernels. Fractions, MiB."""


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of a card; each figure with when and with what, in words."""

    context_mib: tuple[_Mebibytes, _Mebibytes, _Mebibytes] | None = None
    """Low, expected, high."""
    measured: str = ""
    """When and how the context was measured."""
    kernels: dict[str, tuple[_Share, _Share]] = {}
    """For classes of kernels: the fractions of the peak rate and bandwidth that they reach."""
    kernels_measured: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    devices: dict[str, Correction] = {}


def corrections_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(base) / "memplan" / "devices.toml"


def read_corrections(path: Path | None = None) -> dict[str, Correction]:
    """Corrections by the name of the card; none without a file. `path`: another file than the
    user's. Raises FormatError."""
    path = path or corrections_path()
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
            if one.context_mib and list(one.context_mib) != sorted(one.context_mib):
                raise ValueError(f"{name}: context_mib is low, expected, high")
    except (ValueError, msgspec.ValidationError) as error:
        raise FormatError(
            f"{path}: {error}",
            "`memplan verify --calibrate` and `memplan calibrate` write it; without it the tables "
            "hold",
        ) from None
    return found


def context_of(measured_mib: int) -> tuple[int, int, int]:
    """Low, expected and high of a context that was measured once."""
    below = max(round(measured_mib * _BELOW), _LEAST)
    above = max(round(measured_mib * _ABOVE), _LEAST)
    return max(measured_mib - below, 0), measured_mib, measured_mib + above


def save_context(device_name: str, context_mib: tuple[int, int, int], measured: str) -> Path:
    """Put a card's context into the user's file, in the place of an earlier one."""
    path = corrections_path()
    every = read_corrections()
    before = every.get(device_name, Correction())
    after = msgspec.structs.replace(before, context_mib=context_mib, measured=measured)
    _write(path, every | {device_name: after})
    return path


def save_kernels(
    path: Path,
    device_name: str,
    kernels: dict[str, tuple[float, float]],
    measured: str,
    *,
    alone: bool = False,
) -> None:
    """Put a card's kernels into a file, in the place of earlier ones. `alone`: in the place of all
    that the file holds."""
    every = {} if alone else read_corrections(path)
    before = every.get(device_name, Correction())
    after = msgspec.structs.replace(before, kernels=kernels, kernels_measured=measured)
    _write(path, every | {device_name: after})


def _write(path: Path, every: dict[str, Correction]) -> None:
    lines = ["# Measured by `memplan verify --calibrate` and `memplan calibrate`.\n"]
    for name, one in sorted(every.items()):
        lines.append(f"\n[devices.{json.dumps(name)}]\n")
        if one.context_mib is not None:
            lines.append(f"context_mib = {list(one.context_mib)}\n")
            lines.append(f"measured = {json.dumps(one.measured)}\n")
        if one.kernels:
            lines.append(f"kernels_measured = {json.dumps(one.kernels_measured)}\n")
            lines.append(f"[devices.{json.dumps(name)}.kernels]\n")
            lines += [
                f"{json.dumps(kind)} = {list(shares)}\n" for kind, shares in one.kernels.items()
            ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, ["".join(lines).encode()], overwrite=True)
