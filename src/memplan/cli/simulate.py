"""Replay a file through PyTorch's caching allocator, exactly.

FILE is a trace of memplan, a memory snapshot of PyTorch, or an allocator event CSV. Where the file
records the segments that the allocator really took, the replay is compared with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TypedDict

from memplan import __version__
from memplan.cli.command import EXIT_NO, EXIT_YES
from memplan.cli.files import input_path
from memplan.cli.streams import write_answer, write_json
from memplan.types.alloc_conf import merged
from memplan.types.device import find_profile, parse_size

TAKES_PROGRAM = False
_COMPARED = ("segments_logged", "segments_matched", "first_difference")


class ReplayHeader(TypedDict):
    """What the answer of `memplan simulate` begins with; a `ReplayReport` follows."""

    schema_version: int
    memplan_version: str
    torch_version: str
    """The version of PyTorch that the file names."""
    gpu: str | None


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE")
    room = parser.add_mutually_exclusive_group()
    room.add_argument("--gpu", metavar="NAME|SIZE", help="stop at the memory of this card")
    room.add_argument("--capacity", metavar="SIZE", help="stop at this many bytes of segments")
    add("--alloc-conf", metavar="CONF", help="as PYTORCH_ALLOC_CONF; its keys win")
    add("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    path = input_path(args.file)
    profile = find_profile(args.gpu) if args.gpu else None
    capacity = parse_size(args.capacity) if args.capacity else None
    if profile is not None:
        capacity = profile.total_memory_bytes - profile.context_bytes
    from memplan.capturing.importers.load_any import load_any
    from memplan.simulate import AllocatorSettings, replay_report

    if args.alloc_conf:
        AllocatorSettings.parse(args.alloc_conf)
    trace = load_any(path)
    settings = AllocatorSettings.parse(merged(trace.meta.alloc_conf, args.alloc_conf))
    report = replay_report(trace, settings, capacity)
    if args.json:
        header: ReplayHeader = {
            "schema_version": 1,
            "memplan_version": __version__,
            "torch_version": trace.meta.torch_version,
            "gpu": profile.name if profile else None,
        }
        write_json({**header, **report})
    else:
        write_answer(_text(report))
    return EXIT_NO if report.get("oom_event") is not None else EXIT_YES


def _text(report: Mapping[str, object]) -> str:
    from memplan.report.text import format_bytes

    # A capture has no log of the device to compare with.
    unsaid = () if report["segments_logged"] else _COMPARED
    lines = []
    for key, value in report.items():
        if key in unsaid:
            continue
        name = key.replace("_", " ")
        if key.endswith("_bytes") and isinstance(value, int):
            lines.append(f"{name.removesuffix(' bytes'):<20}{format_bytes(value):>12}  {value} B")
        elif isinstance(value, float):
            lines.append(f"{name:<20}{value:>12.3f}")
        elif value is not None:
            lines.append(f"{name:<20}{value!s:>12}")
    return "\n".join(lines) + "\n"
