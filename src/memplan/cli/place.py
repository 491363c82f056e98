"""What to ask a scheduler for: the smallest card and MIG profile, GPU count, host RAM.

FILE is a trace (`memplan estimate -o job.trace …`) or an answer (`memplan estimate --json …`,
`memplan fit --json …`). The high bound is what has to be held. Exit code 3: no card holds it.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.command import EXIT_NO, EXIT_YES, positive
from memplan.cli.files import input_path, is_json
from memplan.cli.streams import write_answer, write_json
from memplan.types.device import find_profile
from memplan.types.errors import FormatError, InfeasibleError, UsageError

if TYPE_CHECKING:
    from memplan.placement.place import Demand

TAKES_PROGRAM = False
FORMATS = ("text", "json", "slurm", "kubernetes", "dra", "kueue", "skypilot", "hami", "kai")
_OBJECT_NAME = re.compile(r"(?=.{1,63}$)[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE")
    add("--format", choices=FORMATS, default="text", help="for whom it is written (text)")
    add("--gpu", metavar="NAME|SIZE", help="this card and its slices, no other")
    add("--mig", action="store_true", help="ask for the MIG slice instead of the card")
    add("--world-size", type=positive, metavar="N", help="processes, where FILE does not say")
    add("--gpus-per-node", type=positive, metavar="N", help="processes of each node")
    add("--queue", metavar="NAME", help="of Kueue or KAI: the queue (default-queue)")
    add("--image", metavar="IMAGE", default="IMAGE", help="of Kubernetes: the container's image")


def run(args: argparse.Namespace) -> int:
    if args.queue is not None and args.format not in ("kueue", "kai"):
        raise UsageError(f"--queue with --format {args.format}", "--format kueue, or --format kai")
    if args.queue is not None and not _OBJECT_NAME.fullmatch(args.queue):
        raise UsageError(
            f"--queue {args.queue!r} is no name of a Kubernetes object",
            "lower-case letters, digits, - and ., as kubectl lists it",
        )
    path = input_path(args.file)
    named = find_profile(args.gpu) if args.gpu else None
    from memplan.placement.place import place

    found = place(_demand(path), named, args.world_size, args.gpus_per_node)
    if args.format == "json":
        write_json(found)
        return EXIT_YES if found.fits else EXIT_NO
    from memplan.placement.text import refusal, text

    if args.format == "text":
        write_answer(text(found))
        return EXIT_YES if found.fits else EXIT_NO
    slot = found.mig if args.mig else found.card
    if slot is None:
        raise InfeasibleError(*refusal(found, mig=args.mig))
    from memplan.placement.formats import Request, written

    write_answer(
        written(args.format, Request(found, slot, args.queue or "default-queue", args.image))
    )
    return EXIT_YES


def _demand(path: Path) -> Demand:
    from memplan.placement.place import demand_of_answer, demand_of_trace

    if is_json(path):
        try:
            return demand_of_answer(path.read_bytes())
        except FormatError as error:
            raise FormatError(f"{path}: {error.message}", error.hint) from None
    from memplan.types.trace_file import load_trace

    return demand_of_trace(load_trace(path))
