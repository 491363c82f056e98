"""Megatron-LM and its packages, below `build/megatron`.

A copy of the sources, because its index builder is compiled in place; Transformer Engine, mamba-ssm
and causal-conv1d without their compiled parts; the optimizers of the Muon cases; and a shim:
Megatron-LM wants `typing.override`, which Python 3.11 does not have.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.megatron.cases import BUILD, SENTENCES, SOURCE
from bench.megatron.sentences import data_path, write_data

PACKAGES = {
    "engine": ("transformer-engine==2.20.2",),
    "packages": (
        "einops==0.8.2",
        "pybind11==3.1.0",
        "mamba-ssm==2.3.2.post1",
        "causal-conv1d==1.7.0",
        "emerging-optimizers==0.3.0",
    ),
}
"""By folder: some cases run without Transformer Engine."""
_HOW = ("--no-deps", "--no-build-isolation", "--ignore-requires-python")
"""The last for emerging-optimizers, which wants Python 3.12 and needs nothing of it."""
_WITHOUT_KERNELS = {
    f"{package}_{what}": "TRUE"
    for package in ("MAMBA", "CAUSAL_CONV1D")
    for what in ("FORCE_BUILD", "SKIP_CUDA_BUILD")
}
_SHIM = """\
import typing

if not hasattr(typing, "override"):
    import typing_extensions

    typing.override = typing_extensions.override
"""


def complete() -> bool:
    """Whether GPT, BERT and T5 cases run without a package being fetched first."""
    builder = importlib.util.find_spec("pybind11") is not None or (BUILD / "packages").is_dir()
    return SOURCE.is_dir() and builder and _engine().is_dir()


def prepare(*, fetch: bool = True) -> Path:
    """Make what is missing, packages only with `fetch`; returns the folder of the sources.

    Raises FileNotFoundError where the sources are absent, and subprocess.CalledProcessError where a
    package cannot be fetched or the index builder not compiled.
    """
    if not SOURCE.is_dir():
        raise FileNotFoundError(f"Megatron-LM's sources are not at {SOURCE}")
    source, shim = BUILD / "source", BUILD / "shim"
    if fetch:
        for place, pins in PACKAGES.items():
            _install(BUILD / place, pins)
    shim.mkdir(parents=True, exist_ok=True)
    (shim / "sitecustomize.py").write_text(_SHIM, encoding="utf-8")
    if not source.is_dir():
        shutil.copytree(SOURCE, BUILD / "copying", dirs_exist_ok=True)
        (BUILD / "copying").rename(source)
    subprocess.run(
        ["make", "-s", "-C", str(source / "megatron" / "core" / "datasets")],
        env=variables(),
        check=True,
    )
    if not data_path(SENTENCES).with_suffix(".idx").exists():
        write_data(SENTENCES)
    return source


def _engine() -> Path:
    """Transformer Engine's Python: fetched for these cases, or the tests' own."""
    own = BUILD / "engine"
    return own if own.is_dir() else Path(sys.prefix, "transformer-engine")


def _install(place: Path, pins: tuple[str, ...]) -> None:
    stamp = place.with_suffix(".pins")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == "\n".join(pins):
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    subprocess.run(
        [*pip, *_HOW, "--upgrade", "--target", str(place), *pins],
        env={**os.environ, **_WITHOUT_KERNELS},
        check=True,
    )
    stamp.write_text("\n".join(pins), encoding="utf-8")


def variables(*, engine: bool = True) -> dict[str, str]:
    """The environment of every case, with Transformer Engine or without."""
    places = [BUILD / "shim", BUILD / "packages", BUILD / "source", *([_engine()] * engine)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        # The Makefile calls `python3`, which is to be this one.
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }
