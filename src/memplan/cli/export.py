"""Turn a trace into a file that another tool opens.

memory_viz is the snapshot pickle that PyTorch's memory visualizer shows; perfetto the JSON that
ui.perfetto.dev shows, compressed if OUT ends in .gz; csv a table with one row for each thing that
the allocator did, which `memplan simulate` reads back.
"""

from __future__ import annotations

import argparse
import importlib

from memplan.cli.command import EXIT_YES
from memplan.cli.files import input_path, output_path
from memplan.cli.streams import write_answer

TAKES_PROGRAM = False
_FORMATS = {
    "memory_viz": ("memory_viz", "export_memory_viz", "drop it on PyTorch's memory visualizer"),
    "perfetto": ("perfetto", "export_perfetto", "open it in ui.perfetto.dev"),
    "csv": ("event_table", "export_csv", "memplan simulate reads it, and so does any spreadsheet"),
}
"""Module, function, and what to do with the file."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--format", required=True, choices=tuple(_FORMATS))
    add("-o", "--output", required=True, metavar="OUT", help="the file to write")
    add("-f", "--force", action="store_true", help="write over an existing file")
    add("--device", type=int, default=0, metavar="N", help="the GPU, where the file has several")
    add("file", metavar="FILE", help="a trace, a PyTorch snapshot or an allocator event CSV")


def run(args: argparse.Namespace) -> int:
    source = input_path(args.file)
    target = output_path(args.output, force=args.force, reads=args.file)
    from memplan.capturing.importers.load_any import load_any

    module, function, what = _FORMATS[args.format]
    write = getattr(importlib.import_module(f"memplan.report.{module}"), function)
    write(load_any(source), target, device=args.device, overwrite=args.force)
    write_answer(f"wrote {args.output}; {what}\n")
    return EXIT_YES
