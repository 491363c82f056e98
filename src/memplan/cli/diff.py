"""What makes the peak of one job higher than that of another.

BEFORE and AFTER are each a trace, a PyTorch memory snapshot, an allocator event CSV, or what
`memplan estimate --json` or `memplan fit --json` wrote. The change of the peak is split by
category, by module and by source line.
"""

from __future__ import annotations

import argparse

from memplan.cli.command import EXIT_YES
from memplan.cli.streams import write_answer, write_json, write_lines
from memplan.types.errors import UsageError

TAKES_PROGRAM = False


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("before", metavar="BEFORE")
    add("after", metavar="AFTER")
    add("--format", choices=("text", "markdown", "html"), default="text",
        help="markdown for a comment, html for a page")  # fmt: skip
    add("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    if args.json and args.format != "text":
        raise UsageError(f"--json with --format {args.format}", "one of the two")
    from memplan.cli.answers import read_estimate
    from memplan.estimation.difference import difference
    from memplan.report.difference import difference_lines, difference_markdown

    answer = difference(
        read_estimate(args.before), read_estimate(args.after), (args.before, args.after)
    )
    if args.json:
        write_json(answer)
    elif args.format == "markdown":
        write_answer(difference_markdown(answer))
    elif args.format == "html":
        from memplan.report.html.comparison import difference_page
        from memplan.report.html.page import render

        write_answer(render(difference_page(answer)).decode())
    else:
        write_lines(difference_lines(answer))
    return EXIT_YES
