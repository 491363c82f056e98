"""A picture of a job's memory as one HTML file, to look at and to send to others.

FILE is a trace, a PyTorch memory snapshot, an allocator event CSV, a plan, or what
`memplan estimate --json` or `memplan fit --json` wrote. The file needs no network and no server.
"""

from __future__ import annotations

import argparse

from memplan.cli.command import EXIT_YES
from memplan.cli.files import input_path, output_path
from memplan.cli.streams import write_answer
from memplan.types.device import find_profile

TAKES_PROGRAM = False


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-o", "--output", required=True, metavar="OUT", help="the HTML file to write")
    add("-f", "--force", action="store_true", help="write over an existing file")
    add(
        "--gpu",
        metavar="NAME|SIZE",
        help="the card of the verdict on a trace; else the one that it was captured for",
    )
    add("file", metavar="FILE")


def run(args: argparse.Namespace) -> int:
    from memplan.cli.answers import MADE_BY
    from memplan.cli.report_pages import page_of
    from memplan.report.html.page import render
    from memplan.types.output_file import write_file

    source = input_path(args.file, made_by=MADE_BY)
    target = output_path(args.output, force=args.force, reads=args.file)
    profile = find_profile(args.gpu) if args.gpu else None
    content = render(page_of(source, profile))
    write_file(target, [content], overwrite=args.force)
    write_answer(f"wrote {args.output}, {len(content):,} bytes; open it in a browser\n")
    return EXIT_YES
