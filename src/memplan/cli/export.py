"""Turn a trace into a file that another tool opens.

memory_viz is the snapshot pickle that PyTorch's memory visualizer shows.
"""

from __future__ import annotations

import argparse

from memplan.cli.command import EXIT_YES
from memplan.cli.files import input_path, output_path
from memplan.cli.streams import write_answer

TAKES_PROGRAM = False


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--format", required=True, choices=("memory_viz",))
    add("-o", "--output", required=True, metavar="OUT", help="the file to write")
    add("-f", "--force", action="store_true", help="write over an existing file")
    add("file", metavar="FILE", help="a trace, a PyTorch snapshot or an allocator event CSV")


def run(args: argparse.Namespace) -> int:
    source = input_path(args.file)
    target = output_path(args.output, force=args.force, reads=args.file)
    from memplan.capturing.importers.load_any import load_any
    from memplan.report.memory_viz import export_memory_viz

    export_memory_viz(load_any(source), target, overwrite=args.force)
    write_answer(f"wrote {args.output}; drop it on PyTorch's memory visualizer\n")
    return EXIT_YES
