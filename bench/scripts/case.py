"""What a case says of itself. The modules of the cases declare `CASES: tuple[Case, ...]`.

Words of a case may hold `{work}`, a folder of its own that keeps what it prepared; `{site}`, the
folder with the packages of its setup; `{source}`, the folder with unpacked source archives; and
`{third_party}`, repositories of scripts beside the shared data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PINS = Path(__file__).with_name("pins.txt")
"""One version of each package, for all setups."""

Answer = Mapping[str, Any]
"""The JSON document of `memplan estimate --json`."""

Check = Callable[[Answer, Path], list[str]]
"""Complaints about an answer, none when it holds up; also gets the case's `work` folder."""


@dataclass(frozen=True)
class Reference:
    """Bytes that memplan had no part in finding, and where they are from."""

    nbytes: int
    says: str


def pinned(names: str) -> tuple[str, ...]:
    """The packages between the spaces, each with its version of `pins.txt`."""
    versions = dict(pin.split("==") for pin in PINS.read_text(encoding="utf-8").split())
    return tuple(f"{name}=={versions[name]}" for name in names.split())


@dataclass(frozen=True)
class Setup:
    """Packages beside those of this environment, the same for several cases.

    They are installed without their dependencies into `build/scripts/<name>/site`, which comes
    first on PYTHONPATH: PyTorch is never fetched, and a version pinned here wins over an installed
    one.
    """

    name: str
    wheels: tuple[str, ...]
    """Requirements pinned with `==`, dependencies written out."""
    sources: tuple[str, ...] = ()
    """Pinned source archives (sdists) to unpack into `{source}`: examples are not in wheels."""


@dataclass(frozen=True)
class Case:
    """One script and how it is run."""

    name: str
    setup: Setup
    package: str
    """Whose script it is, pinned: `trl==1.16.0`."""
    argv: tuple[str, ...]
    """After `memplan estimate --json --gpu GPU`: options of ours, then SCRIPT ARGS…, `-m MODULE
    ARGS…`, or a launcher and its words."""
    gpu: str = "rtx4090"
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands that make model and data below `{work}`, words after `python`; run once, in the root
    of the repository, with the setup's packages."""
    cwd: str = "{work}"
    """The folder that it runs in."""
    environment: Mapping[str, str] = field(default_factory=dict)
    exit_codes: tuple[int, ...] = (0, 3)
    """What is right: (4,) for a script that cannot be captured and has to say so."""
    message: str = ""
    """Words that stderr must hold, for such a script."""
    checks: tuple[Check, ...] = ()
    floor: Reference | None = None
    """What is alive at once in an optimizer step by arithmetic: the peak cannot be less."""
    published: Reference | None = None
    """The peak that its authors measured, of PyTorch's allocated bytes."""
    script: str = ""
    """What is run, in words for the table; without it, `argv`."""
    broke: str = "nothing"
    """What broke when it was first captured."""
    mended: str = ""
    timeout_seconds: float = 900.0


def of_program(
    package: str,
    program: str,
    *arguments: str,
    wheels: tuple[str, ...],
    name: str = "",
    setup: Setup | None = None,
    prepare: tuple[tuple[str, ...], ...] = (),
    checks: tuple[Check, ...] = (),
    floor: Reference | None = None,
    environment: Mapping[str, str] | None = None,
    found: tuple[str, str] = ("nothing", ""),
) -> Case:
    """A case of a program of ours that uses a package: `-m bench.scripts.programs.PROGRAM`."""
    short = name or package.partition("==")[0]
    words = " ".join((program, *arguments))
    return Case(
        name=short,
        setup=setup or Setup(package.partition("==")[0], wheels=wheels),
        package=package,
        argv=("-m", f"bench.scripts.programs.{program}", *arguments),
        prepare=prepare,
        environment=environment or {},
        checks=checks,
        floor=floor,
        script=f"`-m bench.scripts.programs.{words}`",
        broke=found[0],
        mended=found[1],
    )
