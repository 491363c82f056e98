"""The packages of a setup: fetched once into `build/scripts`, never into this environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from bench.results import ROOT
from bench.scripts.case import Case, Setup

BUILD = ROOT / "build" / "scripts"
THIRD_PARTY = (
    Path(os.environ.get("MEMPLAN_SHARED_DATA") or ROOT.parent / "shared" / "data").parent
    / "third_party"
)
"""Scripts of others that are in no package; cases of theirs need the folder."""
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


class CannotPrepareError(Exception):
    """A package cannot be fetched, or a model or data set not made; says which and why."""


def places(case: Case) -> dict[str, Path]:
    """What `{work}`, `{site}` and `{source}` stand for."""
    base = BUILD / case.setup.name
    return {
        "work": BUILD / "work" / case.name,
        "site": base / "site",
        "source": base / "source",
        "third_party": THIRD_PARTY,
    }


def filled(words: tuple[str, ...], folders: Mapping[str, Path]) -> list[str]:
    """The words with the folders put in."""
    result = []
    for word in words:
        for name, folder in folders.items():
            word = word.replace("{" + name + "}", str(folder))
        result.append(word)
    return result


def variables(case: Case) -> dict[str, str]:
    """The environment that a case runs in."""
    folders = places(case)
    path = [str(folders["site"]), str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **{name: filled((text,), folders)[0] for name, text in case.environment.items()},
    }


def install(setup: Setup) -> None:
    """Fetch what is missing. Raises CannotPrepareError."""
    base = BUILD / setup.name
    _once(base / "site", setup.wheels, _install_wheels)
    _once(base / "source", setup.sources, _unpack)


def prepare(case: Case) -> None:
    """Make the case's model and data if its commands changed. Raises CannotPrepareError."""
    folders = places(case)
    if any("{third_party}" in word for word in case.argv) and not THIRD_PARTY.is_dir():
        raise CannotPrepareError(f"{THIRD_PARTY}: no such folder; MEMPLAN_SHARED_DATA sets another")
    folders["work"].mkdir(parents=True, exist_ok=True)
    Path(*filled((case.cwd,), folders)).mkdir(parents=True, exist_ok=True)
    for number, command in enumerate(case.prepare):
        words = [sys.executable, *filled(command, folders)]
        stamp = folders["work"] / f".prepared-{number}"
        if not _current(stamp, words):
            _run(words, environment=variables(case))
            stamp.write_text("\n".join(words), encoding="utf-8")


def _once(folder: Path, pins: tuple[str, ...], fill: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder.parent / f"{folder.name}.pins"
    if pins and not _current(stamp, pins):
        assert callable(fill)
        fill(folder, pins)
        stamp.write_text("\n".join(pins), encoding="utf-8")


def _current(stamp: Path, words: tuple[str, ...] | list[str]) -> bool:
    return stamp.exists() and stamp.read_text(encoding="utf-8") == "\n".join(words)


def _install_wheels(folder: Path, pins: tuple[str, ...]) -> None:
    _run([*_PIP, "install", "--no-deps", "--upgrade", "--target", str(folder), *pins])


def _unpack(folder: Path, pins: tuple[str, ...]) -> None:
    archives = folder.parent / "archives"
    for pin in pins:
        _run([*_PIP, "download", "--no-deps", "--no-binary", ":all:", "-d", str(archives), pin])
    for archive in sorted(archives.glob("*.tar.gz")):
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")


def _run(words: list[str], environment: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotPrepareError(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        raise CannotPrepareError(f"{' '.join(words)}\n{done.stderr[-2000:]}")
