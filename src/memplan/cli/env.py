"""What memplan finds here: versions, whether capturing works, the GPU, the known cards."""

from __future__ import annotations

import argparse
import platform
import sys

import msgspec

from memplan import __version__
from memplan.capturing.patches.internals import refusal
from memplan.cli.command import EXIT_YES
from memplan.cli.machine import machine_gpu
from memplan.cli.streams import write_answer, write_json
from memplan.types.device import DeviceProfile, known_profiles
from memplan.worker.streams import stdout_to_stderr

TAKES_PROGRAM = False


class Environment(msgspec.Struct, kw_only=True):
    """The answer of `memplan env`."""

    schema_version: int = 1
    memplan_version: str
    torch_version: str
    """Empty when torch is not installed."""
    python: str
    platform: str
    native: bool
    """Whether the native library loads."""
    capture_ok: bool
    capture_detail: str
    gpu: str | None
    """Name of this machine's GPU."""
    gpu_bytes: int | None
    """Memory of the GPU as nvidia-smi counts it."""
    profiles: list[DeviceProfile]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    gpu = machine_gpu()
    with stdout_to_stderr():
        capture_ok, detail = _self_test()
    found = Environment(
        memplan_version=__version__,
        torch_version=_version("torch"),
        python=sys.version.split()[0],
        platform=platform.platform(),
        native=_native(),
        capture_ok=capture_ok,
        capture_detail=detail,
        gpu=gpu.name if gpu else None,
        gpu_bytes=gpu.total_bytes if gpu else None,
        profiles=list(known_profiles()),
    )
    if args.json:
        write_json(found)
    else:
        write_answer(_text(found))
    return EXIT_YES


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _native() -> bool:
    try:
        from memplan import _native  # noqa: F401
    except ImportError:
        return False
    return True


def _self_test() -> tuple[bool, str]:
    try:
        from memplan.capturing.trial import trial
    except Exception as error:  # The report is the point: whatever stops a capture is shown.
        of_pytorch = refusal(error)
        return False, of_pytorch.message if of_pytorch else f"{type(error).__name__}: {error}"
    result = trial()
    return result.ok, result.detail


def _text(found: Environment) -> str:
    from memplan.report.text import format_bytes

    capture = "works" if found.capture_ok else "does not work"
    gpu = f"{found.gpu}, {format_bytes(found.gpu_bytes or 0)}" if found.gpu else "none"
    lines = [
        f"memplan   {found.memplan_version}",
        f"torch     {found.torch_version or 'not installed'}",
        f"python    {found.python} on {found.platform}",
        f"native    {'loaded' if found.native else 'not built: pip install .'}",
        f"capture   {capture}{': ' + found.capture_detail if found.capture_detail else ''}",
        f"gpu       {gpu}",
        "",
        f"{'--gpu':<12}{'memory':>10}  {'sm':>5}  {'context':>8}  name",
    ]
    lines += [
        f"{p.name:<12}{format_bytes(p.total_memory_bytes):>10}  {p.capability_text:>5}  "
        f"{format_bytes(p.context_bytes):>8}  {p.device_name}"
        for p in found.profiles
    ]
    return "\n".join(lines) + "\n"
